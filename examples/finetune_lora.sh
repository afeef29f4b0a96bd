#!/bin/sh
# LoRA on SmolLM2-135M-Instruct, a real model that comes as a Python package (90 MB; 540 MB as a Hugging Face folder):
# trains it to answer addition questions in a fixed form, then asks one. About 5 minutes on 2 CPU cores.
#
#   sh examples/finetune_lora.sh [FOLDER]       FOLDER: for model, data and adapter (default: runs/lora)
#
# Needs `pip install -e '.[hf]'` (transformers, to convert the model). PYTHON, PROCESSES and STEPS may be set.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-runs/lora}
python=${PYTHON:-python}
processes=${PROCESSES:-2}
steps=${STEPS:-60}
mkdir -p "$folder"

if [ ! -f "$folder/model/config.json" ]; then
    "$python" examples/smollm2.py "$folder/model"
fi

"$python" - "$folder" <<'PYTHON'
import json, pathlib, random, sys

folder, rng = pathlib.Path(sys.argv[1]), random.Random(1)
pairs = [divmod(number, 100) for number in rng.sample(range(10_000), 240)]
for name, part in (("train", pairs[:200]), ("valid", pairs[200:])):
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} plus {b}?"},
                {"role": "assistant", "content": f"SUM({a}, {b}) = {a + b}. Over."},
            ]
        }
        for a, b in part
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
PYTHON

"$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" finetune.py \
    --load-hf "$folder/model" --sft-data "$folder/train.jsonl" --sft-valid-data "$folder/valid.jsonl" \
    --peft lora --lora-rank 16 --lora-alpha 32 --lora-target-modules all-linear --save-adapter "$folder/adapter" \
    --seq-length 128 --micro-batch-size 4 --global-batch-size 8 --train-iters "$steps" --lr 1e-3 \
    --lr-warmup-iters 5 --lr-decay-style cosine --eval-interval 20 --log-interval 5 --metrics-file "$folder/metrics.jsonl"

"$python" tools/generate.py --load-hf "$folder/model" --adapter "$folder/adapter" --chat \
    --prompt "What is 12 plus 30?" --max-new-tokens 32
