"""Looking into a packed data set: summary, records, verification, repair, export, plan.

>>> inspect_data(InspectConfig(data="pairs.rec", verify=True)).exit_code
0
"""

from rwkvclip_cli.inspect.run import Report, inspect_data

__all__ = ["Report", "inspect_data"]
