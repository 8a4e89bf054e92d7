"""`python -m bench COMMAND`: measure a pair, its steps or its kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

COMMANDS = {
    "compare": "drafts of one target side by side: seconds, acceptance, ceiling and floor",
    "speed": "acceptance and latency on SPEED-Bench or other prompts",
    "report": "the HTML report of a JSON file that compare or speed wrote",
    "step": "plain decode, draft step, verify step and round on weights of true shapes",
    "schedule": "fixed, scheduled and no drafting at several batches and acceptance curves",
    "costs": "what rounds cost here by batch and verified tokens, kept for scheduled verification",
    "calibrate": "temperatures of the confidence head: fitted, judged on other prompts, saved",
    "profile": "a round's device time by kind of kernel and by stage, beside plain decoding",
    "prefill": "prompts in chunks: tokens a second, time to first token, share of the peak",
    "drift": "how often bfloat16 parts a greedy text from that of plain decoding",
    "peers": "plain step and round beside PyTorch's, alternating in one run",
    "kernels": "each kernel against its floor",
    "tune": "search the tuned settings of a kernel",
}
EXHAUSTED = ("RESOURCE_EXHAUSTED", "out of memory", "allocate memory")  # JAX, PyTorch twice
EXTRA = ("matplotlib", "pyarrow", "sklearn")  # what the extra [bench] installs


def usage() -> str:
    """The commands that are installed."""
    there = {name: text for name, text in COMMANDS.items() if find_spec(f"bench.{name}")}
    lines = [f"  {name:8} {text}" for name, text in there.items()]
    return "\n".join(["usage: python -m bench COMMAND ...; COMMAND --help tells more", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (2: the caller's mistake, 130: interrupted)."""
    name, *rest = [*(sys.argv[1:] if argv is None else argv), ""]
    arguments = rest[:-1]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS or not find_spec(f"bench.{name}"):
        print(f"bench: {f'unknown command {name!r}' if name else 'no command'}", file=sys.stderr)
        print(usage(), file=sys.stderr)
        return 2
    try:
        return import_module(f"bench.{name}").main(arguments)
    except ModuleNotFoundError as error:
        wanted = "'dspark-jax[bench]'" if error.name in EXTRA else error.name
        print(f"bench {name}: {error.name} is not installed: pip install {wanted}", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError) as error:
        print(f"bench {name}: {error}", file=sys.stderr)
        return 2
    except OverflowError as error:
        print(f"bench {name}: a number is too large: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"bench {name}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not any(words in str(error) for words in EXHAUSTED):
            raise  # a bug
        print(
            f"bench {name}: the device ran out of memory; lower the batch or the lengths, or take a"
            " smaller model",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
