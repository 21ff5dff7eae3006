"""python -m benchmarks op | growth | model | compile | linearize | gpu"""

from __future__ import annotations

import argparse

from . import compile_time, gpu, growth, linearize, model, op

COMMANDS = {
    "op": (op, "one attention call: softmax, TTT operators, fused kernel"),
    "growth": (growth, "how the fused kernel's time grows with the tokens"),
    "model": (model, "an SD3.5-shaped transformer at 1K and 2K: softmax, half and all converted, and their bounds"),
    "compile": (compile_time, "how long backend t5 compiles, beside Inductor on the unconverted model"),
    "gpu": (gpu, "all of it on a GPU, with correctness and rates beside a copy and a matmul"),
    "linearize": (linearize, "how long t5fx.linearize takes on full-size models, and its peak memory"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed, as ratios against peers.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, description) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=description, description=module.__doc__))
    args = parser.parse_args()
    COMMANDS[args.command][0].run(args)


if __name__ == "__main__":
    main()
