"""`make quickstart`: train a small GPT on this Python's own source code and generate a sample, step by step.

Each step is a command that is printed before it runs, so that you can repeat it with other files.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = Path("runs/quickstart")
TOKENIZER = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{RUN}/tokenizer.model"]
PROMPT = "def read_lines(path):\n"


def run(title: str, *command: str, capture: bool = False) -> str:
    """Print and run one command from the top of the repository; end with its exit status if it fails."""
    print(f"\n=== {title}\n$ {shlex.join(command)}", flush=True)
    words = [sys.executable if word == "python" else word for word in command]
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    done = subprocess.run(words, cwd=ROOT, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print("usage: quickstart.py\n\n" + (__doc__ or ""))
        return 0
    begun = time.monotonic()
    run("collect real text", "python", "tools/build_corpus.py", "--output", f"{RUN}/corpus")
    corpus, size = f"{RUN}/corpus/train.jsonl", "4096"
    prefix = ["--output-prefix", f"{RUN}/tokenizer"]
    run("train a tokenizer", "python", "tools/train_tokenizer.py", "--input", corpus, "--vocab-size", size, *prefix)
    for split in ("train", "valid"):
        paths = ["--input", f"{RUN}/corpus/{split}.jsonl", "--output-prefix", f"{RUN}/{split}"]
        run(f"tokenize the {split} text", "python", "tools/preprocess_data.py", *paths, *TOKENIZER, "--append-eod")
    data = [f"--{split}-data-path={RUN}/{split}_text_document" for split in ("train", "valid")]
    (ROOT / RUN / "metrics.jsonl").unlink(missing_ok=True)
    outputs = [
        f"--save={RUN}/checkpoint",
        f"--tensorboard-dir={RUN}/tensorboard",
        f"--metrics-file={RUN}/metrics.jsonl",
    ]
    launch = ["torchrun", "--standalone", "--nproc-per-node", "2", "pretrain_gpt.py", "@examples/quickstart.args"]
    run("train on two processes with tensor parallelism", *launch, *data, *TOKENIZER, *outputs)
    files = ["--train", f"{RUN}/train_text_document", "--valid", f"{RUN}/valid_text_document"]
    words = ["python", "tools/bigram_loss.py", *files, "--vocab-size", size]
    bigram = float(run("compute the loss of a bigram model, for comparison", *words, capture=True).split()[2])
    generate = ["--load", f"{RUN}/checkpoint", "--prompt", PROMPT, "--temperature", "0.6", "--max-new-tokens", "96"]
    sample = run("generate text", "python", "tools/generate.py", *generate, "--json", capture=True)
    result = json.loads((ROOT / RUN / "metrics.jsonl").read_text().splitlines()[-1])["lm_loss"]
    print(PROMPT + json.loads(sample)["text"])
    print(
        f"""
=== done in {(time.monotonic() - begun) / 60:.1f} minutes
held-out loss: {result:.3f} nats per token; a bigram model has {bigram:.3f}: {bigram - result:.3f} better

checkpoint    {RUN}/checkpoint
curves        .venv/bin/tensorboard --logdir {RUN}/tensorboard
generate more .venv/bin/python tools/generate.py --load {RUN}/checkpoint --prompt "class Queue" --temperature 0.8
your own text put documents into a .jsonl or .txt file and repeat the commands above with it
other layouts --pipeline-model-parallel-size 2 in place of --tensor-model-parallel-size 2; README.md has more
every flag    .venv/bin/python pretrain_gpt.py --help
"""
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
