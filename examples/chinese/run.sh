#!/bin/sh
# 用 Debian 的 fortunes-zh 包（唐诗、宋词、论语、谚语）训练一个会写中文的小 GPT：下载文本、训练分词器、预处理、训练、生成文本。
# Trains a small GPT on Chinese poems and sayings from a Debian package, and prints a sample. See README.md in this folder.
#
#   sh examples/chinese/run.sh [FOLDER]       FOLDER: for text, tokenizer, data and checkpoint (default: runs/chinese)
#
# SOURCE=DIR takes the files tang300, song100 and chinese from DIR instead of apt-get (no root needed for either).
# PYTHON, PROCESSES and STEPS may be set.
set -eu
cd "$(dirname "$0")/../.."
folder=${1:-runs/chinese}
python=${PYTHON:-python}
processes=${PROCESSES:-2}
steps=${STEPS:-300}
mkdir -p "$folder"

if [ -z "${SOURCE:-}" ]; then
    SOURCE="$folder/package/usr/share/games/fortunes"
    if [ ! -f "$SOURCE/tang300" ]; then
        if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
            echo "缺少 apt-get 或 dpkg-deb：请从别处下载并解压 fortunes-zh，再设置 SOURCE=文件夹（见 README.md）" >&2
            exit 1
        fi
        (cd "$folder" && apt-get download fortunes-zh)
        dpkg-deb -x "$folder"/fortunes-zh_*.deb "$folder/package"
    fi
fi

tokenizer="--tokenizer-type SentencePieceTokenizer --tokenizer-model $folder/tokenizer.model"

"$python" examples/chinese/make_corpus.py "$SOURCE" "$folder/corpus"
"$python" tools/train_tokenizer.py --input "$folder/corpus/train.jsonl" --vocab-size 6144 --character-coverage 0.99 \
    --output-prefix "$folder/tokenizer"
for part in train valid; do
    "$python" tools/preprocess_data.py --input "$folder/corpus/$part.jsonl" --output-prefix "$folder/$part" \
        --append-eod $tokenizer
done

"$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" pretrain_gpt.py \
    @examples/chinese/model.args --train-iters "$steps" $tokenizer \
    --train-data-path "$folder/train_text_document" --valid-data-path "$folder/valid_text_document" \
    --save "$folder/checkpoint" --load "$folder/checkpoint" --save-interval 100 --metrics-file "$folder/metrics.jsonl" \
    --exit-signal-handler

echo "作为对比，二元语法模型（bigram）在同一验证集上的损失："
"$python" tools/bigram_loss.py --train "$folder/train_text_document" --valid "$folder/valid_text_document" \
    --vocab-size 6144

"$python" tools/generate.py --load "$folder/checkpoint" --temperature 0.8 --top-k 40 --max-new-tokens 96 --prompt "《秋夜》
作者：王维
"
