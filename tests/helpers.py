"""What tests of several rooms share: small packed files, free ports, real commands and real ranks."""

import io
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from rwkvclip_cli.data.recordio import Record, RecordWriter, pack_record

TINY_MODEL = {
    "ctx_len": 16,
    "data_type": "utf-8",
    "dim_att": 32,
    "dim_ffn": 96,
    "drop_path_rate": 0.1,
    "dropout": 0.0,
    "head_qk": 0,
    "head_size": 16,
    "head_size_divisor": 8,
    "image_depth": 2,
    "image_embed_dims": 32,
    "image_hidden_rate": 2,
    "image_num_heads": 2,
    "image_output_cls_token": False,
    "image_patch_size": 8,
    "image_with_cls_token": False,
    "input_size": 16,
    "n_embd": 32,
    "n_layer": 2,
    "pos_emb": 0,
    "precision": "fp32",
    "text_initialization": True,
    "text_num_head": 0,
    "tiny_att_dim": 0,
    "tiny_att_layer": -999,
    "vocab_size": 512,
    "with_cp": False,
    "workers": 0,
}


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def jpeg(seed: int, size: tuple[int, int] = (20, 16)) -> bytes:
    """A small JPEG whose look depends on the seed."""
    draw_random = random.Random(seed)
    image = Image.new("RGB", size, tuple(draw_random.randrange(256) for _ in range(3)))
    corners = [draw_random.randrange(max(size)) for _ in range(4)]
    box = (min(corners[::2]), min(corners[1::2]), max(corners[::2]), max(corners[1::2]))
    ImageDraw.Draw(image).ellipse(box, fill=tuple(draw_random.randrange(256) for _ in range(3)))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_packed(rec: Path, count: int, *, captions: int = 3, context_length: int = 16, vocab_size: int = 512) -> Path:
    """Write a packed file of `count` records with a manifest; caption c of record i starts with id 1 + (i, c)."""
    with RecordWriter(rec, sync=False) as writer:
        for ordinal in range(count):
            labels: list[float] = []
            for slot in range(captions):
                own = 1 + (ordinal * captions + slot) % (vocab_size - 1)
                labels += [own, 1 + ordinal % 7, vocab_size - 1] + [0] * (context_length - 3)
            writer.write(pack_record(Record(labels, jpeg(ordinal), ordinal)))
    manifest = {"format_version": 1, "count": count, "captions": captions, "context_length": context_length}
    rec.with_suffix(".manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return rec


def write_model_config(path: Path, **changes: object) -> Path:
    """Write the arguments of a model that trains in milliseconds."""
    path.write_text(json.dumps({**TINY_MODEL, **changes}), encoding="utf-8")
    return path


def run_cli(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, timeout_s: float = 200
) -> subprocess.CompletedProcess[str]:
    """Run `rwkvclip ARGUMENTS` in a process of its own, without the ranks that this one may have."""
    command = [sys.executable, "-m", "rwkvclip_cli", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=plain_environment(env), capture_output=True, text=True, check=False, timeout=timeout_s
    )


def run_ranks(
    world_size: int, arguments: Sequence[str | Path], *, cwd: Path | None = None, timeout_s: float = 250
) -> subprocess.CompletedProcess[str]:
    """Run `rwkvclip ARGUMENTS` as `world_size` ranks under the real torchrun, over gloo."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "rwkvclip_cli"]
    return subprocess.run(
        [*launcher, *map(str, arguments)],
        cwd=cwd,
        env=plain_environment({"RWKVCLIP_DEVICE": "cpu"}),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def plain_environment(changes: dict[str, str] | None) -> dict[str, str]:
    """This environment without what would make a process a rank; one thread a process."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PET_", "NCCL_", "MASTER_", "RWKVCLIP_")) and name not in ("RANK", "LOCAL_RANK")
    }
    return {**kept, "OMP_NUM_THREADS": "1", **(changes or {})}
