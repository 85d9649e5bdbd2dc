"""Where a decode step's time goes on the CPU server: python scripts/step_split.py [REQUESTS [PREFIXES [PREFIX_TOKENS]]]

Samples the scheduler's process with py-spy (it comes with sglang) while one batch decodes on the locality page's
server, and sorts the samples by the innermost function that is told apart.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import psutil
from markers import ROOT

from feather_sglang.bench import batches, locality
from feather_sglang.bench.server import Server
from feather_sglang.bench.tiny_model import ATTENTION, make_tiny_model

_SECONDS = 12
_OUTPUT_TOKENS = 512
#: What a frame of py-spy's says, innermost first, and what it stands for.
_PARTS = (
    ("cpu_decode.py", "decode attention, Feather's kernel"),
    ("feather_sglang", "Feather: attention outside the kernel, scheduling"),
    ("sampler.py", "SGLang: sampling"),
    ("sampling", "SGLang: sampling"),
    ("forward_batch_info.py", "SGLang: preparing the batch"),
    ("schedule_batch.py", "SGLang: preparing the batch"),
    ("models/", "model: linear layers, norms, writing KV"),
    ("layers/", "model: linear layers, norms, writing KV"),
    ("output_processor", "SGLang: results and streaming"),
    ("batch_result_processor", "SGLang: results and streaming"),
    ("request_receiver", "SGLang: receiving requests"),
    ("model_executor/", "SGLang: around the model"),
    ("managers/", "SGLang: rest of the scheduler's loop"),
)


def split(raw: str) -> Counter[str]:
    """Samples by part, of py-spy's raw format: a stack, outermost first, and how often it was seen."""
    found: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        if "event_loop" not in stack:
            continue  # another thread
        frames = reversed(stack.split(";"))
        part = next((part for frame in frames for mark, part in _PARTS if mark in frame), "other")
        found[part] += int(count)
    return found


def _sample(server: Server, folder: Path) -> str:
    family = psutil.Process(server.pid).children(recursive=True)
    [scheduler] = [each for each in family if each.name().startswith("sglang::schedul")]
    out = folder / "stacks.txt"
    spy = Path(sys.executable).with_name("py-spy")
    command = [str(spy), "record", f"--pid={scheduler.pid}", f"--duration={_SECONDS}", "--rate=200", "--format=raw"]
    subprocess.run([*command, "--full-filenames", f"--output={out}"], check=True, stdout=sys.stderr)
    return out.read_text()


def main() -> int:
    """Print the split of one kind of batch."""
    requests, prefixes, length = (int(each) for each in (*sys.argv[1:], *("32", "1", "8192")[len(sys.argv) - 1 :]))
    model = make_tiny_model(ROOT / ".demo" / "attention-model", shape=ATTENTION)
    flags = [f"--model-path={model}", "--max-running-requests=64", *locality.FLAGS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Server(flags, folder / "server.log") as server:
            prompts = batches.Prompts(prefixes, length, 32)
            for prefix in range(prefixes):
                asyncio.run(batches.send(server.url, [prompts.one(prefix)], 1))
            batch = [prompts.one(prefix) for prefix in batches.groups(requests, prefixes)]
            rates: list[float] = []

            def drive() -> None:
                tracks = asyncio.run(batches.send(server.url, batch, _OUTPUT_TOKENS))
                rates.append(batches.decode_rate(tracks))

            client = threading.Thread(target=drive)
            client.start()
            threading.Event().wait(4)  # its prefill, of suffixes alone
            raw = _sample(server, folder)
            client.join()
    found = split(raw)
    step_ms = 1e3 * requests / rates[0]
    print(f"{requests} requests, {prefixes} prefixes of {length}: a step takes {step_ms:.1f} ms")
    for part, count in found.most_common():
        share = count / found.total()
        print(f"{part:<52}{share:>7.1%}{share * step_ms:>9.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
