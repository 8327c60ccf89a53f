"""Text that is nested thousands of levels deep, wherever JSON or TOML is read: an error, never a traceback."""

import json
import socket
from pathlib import Path

import pytest
from helpers import free_port, run_cli, write_packed
from pack_files import folder_of

from rwkvclip_cli.config import InspectConfig, read_config
from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.packing.samples import BadCaptions, Sample, Sidecar, find_captions
from rwkvclip_cli.documents import MAX_LEVELS, TOO_DEEP, parse_json, parse_toml
from rwkvclip_cli.inspect import inspect_data
from rwkvclip_cli.launch.network import parse_endpoint
from rwkvclip_cli.launch.peers import peers_at
from rwkvclip_cli.model.presets import read_model_config
from rwkvclip_cli.train.checkpoint import STATE_FILE, read_state

# Around the depths at which Python's own reader, its repr and its writer give up.
DEPTHS = [MAX_LEVELS + 1, 400, 900, 985, 10_000]


def lists(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_what_may_be_nested_may_be() -> None:
    text = lists(MAX_LEVELS)
    assert json.dumps(parse_json(text)) == text
    assert json.dumps(parse_toml(f"a = {lists(MAX_LEVELS - 1)}")) == f'{{"a": {lists(MAX_LEVELS - 1)}}}'
    wide = "[" + ",".join(["[]"] * 3000) + "]"
    assert len(parse_json(wide)) == len(parse_json(wide.encode())) == 3000


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_is_deeper_is_refused(depth: int) -> None:
    for text in (lists(depth), lists(depth).encode(), '{"a":' * depth + "1" + "}" * depth):
        with pytest.raises(ValueError, match=TOO_DEEP):
            parse_json(text)
    for text in (f"a = {lists(depth)}", "a = " + "{b = " * depth + "1" + "}" * depth, "a" + ".a" * depth + " = 1"):
        with pytest.raises(ValueError, match=TOO_DEEP):
            parse_toml(text)


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_file_that_is_deeper_is_told_by_its_name(depth: int, tmp_path: Path) -> None:
    toml, model = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text(f"[pack]\nsources = {lists(depth)}\n")
    with pytest.raises(UsageError, match=rf"a\.toml: not valid TOML: {TOO_DEEP}"):
        read_config(toml)
    model.write_text(lists(depth))
    for path in (toml, model):
        with pytest.raises(UsageError, match=rf"{path.name}: not valid TOML or JSON .*{TOO_DEEP}"):
            read_model_config(path)
    (tmp_path / STATE_FILE).write_text(lists(depth))
    with pytest.raises(RwkvClipError, match=f"{STATE_FILE}: damaged: {TOO_DEEP}"):
        read_state(tmp_path)
    (tmp_path / "a.txt").write_text(lists(depth))
    with pytest.raises(BadCaptions, match=TOO_DEEP):
        find_captions(Sample("a.jpg", "a.jpg", sidecars=(Sidecar("json", str(tmp_path / "a.txt")),)))
    rec = write_packed(tmp_path / "a.rec", 3)
    manifest = rec.with_suffix(".manifest.json")
    manifest.write_text(manifest.read_text()[:-1] + f', "statistics": {lists(depth)}}}')
    for mode in ({}, {"verify": True, "proof": "none"}):
        report = inspect_data(InspectConfig(data=str(rec), **mode))  # type: ignore[arg-type]
        assert report.exit_code == 1
        assert f"manifest: a.manifest.json is damaged: {TOO_DEEP}" in report.text


def test_the_commands_end_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "rwkvclip.toml").write_text(f"[pack]\nsources = {lists(10_000)}\n")
    (tmp_path / "other.toml").write_text("")
    (tmp_path / "model.json").write_text(lists(10_000))
    done = run_cli("inspect", "a.rec", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"rwkvclip: rwkvclip.toml: not valid TOML: {TOO_DEEP}\n")
    folder = folder_of(tmp_path / "imgs", 1)
    (folder / "000.txt").unlink()
    (folder / "000.json").write_text(lists(10_000))
    done = run_cli("pack", "imgs", "o.rec", "--proof", "none", "--config", "other.toml", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert f"000.json is not valid JSON: {TOO_DEEP}" in done.stderr


def test_a_long_value_in_the_settings_file_makes_no_long_message(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f"[pack]\nsources = {lists(90)}\nquality = '{'x' * 5000}'")
    with pytest.raises(UsageError) as caught:
        read_config(tmp_path / "a.toml")
    assert len(caught.value.message) < 200 + len(str(tmp_path))


def test_somebody_elses_deep_datagram_ends_no_launch() -> None:
    endpoint = parse_endpoint(f"127.0.0.1:{free_port()}")
    with peers_at(endpoint, job="job", hosting=True) as peers, socket.socket(type=socket.SOCK_DGRAM) as stranger:
        stranger.sendto(lists(4000).encode(), ("127.0.0.1", endpoint.port))
        stranger.sendto(b"[]", ("127.0.0.1", endpoint.port))
        peers._wait_for_data(5)
        assert peers.cause is None
