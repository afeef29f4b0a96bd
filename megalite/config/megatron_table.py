"""How megalite answers Megatron-LM's flags that it doesn't have. Only data; `megatron_flags.py` reads it.

TABLE covers the flags of Megatron-LM 0.20 that `schema.py` doesn't define; EARLIER, flags of older versions that
scripts still carry. Blocks begin with `[answer] reason`. The answers:

- ignored: accepted, with one line that gives the reason; results don't depend on it;
- changes results, not built: refused; the reason says what is missing;
- use instead: refused; the reason is the flag to use.

Then come the flags: `--name` is a switch, `--name=` takes a value, `--name+=` one or more, `--name*=` any number. A
slash joins two spellings. After `=` come harmless values (`|` between them): with these a refused flag is ignored.
"""

from __future__ import annotations

# Flags of `schema.py` that Megatron-LM doesn't have, besides those of finetune.py alone.
OWN = """
--preset --label-smoothing --pipeline-schedule --device --threads-per-rank --nan-action --compile --dump-grads --fp64
--max-skips-in-a-row --adam-backend
--fp8-backend --keep-last-checkpoints --metrics-file --timeline --log-memory --log-top-grad-norms
--model-vocab-size --rope-low-freq-factor --rope-high-freq-factor --rope-original-max-position-embeddings
--rope-attention-factor --yarn-mscale --yarn-mscale-all-dim --longrope-short-factor --longrope-long-factor
--add-proj-bias --parse-special-tokens
"""

# Flags of Megatron-LM that set a field of `schema.py` with another flag name: flag, field, and the value it stands for.
SHORTHANDS = """
--encoder-num-layers model.num_layers
--encoder-seq-length data.seq_length
--use-flash-attn model.attention_backend flash
--use-rotary-position-embeddings model.position_embedding_type rope
--yarn-original-max-position-embeddings model.rope_original_max_position_embeddings
"""

# Values of Megatron-LM that we don't have; `value=ours`: our value with the same meaning.
VALUES = """
--position-embedding-type mrope relative
--optimizer muon dist_muon lion soap adaptive_muon
--fp8-recipe custom
--dataloader-type external
--tokenizer-type BertWordPieceLowerCase BertWordPieceCase MultimodalTokenizer NullMultimodalTokenizer SFTTokenizer
 GPTSentencePieceTokenizer=SentencePieceTokenizer Llama2Tokenizer=SentencePieceTokenizer
"""

TABLE = """
[ignored] speed only: megalite decides this itself
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
--no-persist-layer-norm --no-gradient-accumulation-fusion --no-gradient-reduce-div-fusion --cross-entropy-loss-fusion
--cross-entropy-fusion-impl= --fused-residual-rmsnorm --use-te-activation-func --use-transformer-engine-op-fuser
--disable-jit-fuser --flash-attention-version= --use-fused-weighted-squared-relu --mlp-chunks-for-training=
--use-grouped-gemm-for-dense-mlp --transformer-impl= --use-mcore-models --enable-cuda-graph --external-cuda-graph
--cuda-graph-warmup-steps= --cuda-graph-impl= --cuda-graph-scope+= --cuda-graph-modules+= --optimizer-cuda-graph
--fp8-interval= --keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag --use-torch-optimizer-for-cpu-offload
--overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params
--no-clone-scatter-output-in-embedding/--disable-clone-scatter-output-in-embedding --use-gigatoken
--tokenizer-hf-no-use-fast --num-dataset-builder-threads= --per-dataset-sequences-path= --dataloader-fast-cache-load
--dataloader-defer-npy-index-mmap --empty-unused-memory-level= --manual-gc --manual-gc-interval=
--no-manual-gc-eval/--disable-manual-gc-eval --train-sync-interval=
[ignored] speed only: megalite arranges its communication itself
--tp-comm-overlap --tp-comm-overlap-rs-dgrad --tp-comm-bootstrap-backend= --tp-comm-overlap-cfg=
--no-tp-comm-bulk-wgrad/--disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad/--disable-tp-comm-bulk-dgrad
--no-tp-comm-overlap-ag/--disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs/--disable-tp-comm-overlap-rs
--no-tp-comm-split-ag/--disable-tp-comm-split-ag --no-tp-comm-split-rs/--disable-tp-comm-split-rs
--use-ring-exchange-p2p --overlap-p2p-communication-warmup-flush --no-overlap-p2p-communication --delay-wgrad-compute
--defer-embedding-wgrad-compute --wgrad-deferral-limit= --no-align-grad-reduce/--disable-align-grad-reduce
--no-align-param-gather --overlap-param-gather-with-optimizer-step --ddp-num-buckets=
--ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective --no-use-layer-wise-param-layout --use-nccl-ub
--disable-symmetric-registration --create-all-gather-group --suggested-communication-unit-size=
--num-distributed-optimizer-instances= --use-sharp --sharp-enabled-group= --high-priority-stream-groups+=
--nccl-communicator-config-path= --pipeline-model-parallel-comm-backend= --disable-gloo-process-groups
--symmetric-ar-type= --distributed-timeout-seconds-after-init= --use-tp-pp-dp-mapping --local-rank= --lazy-mpu-init
[ignored] megalite always does this
--accumulate-allreduce-grads-in-fp32 --ddp-param-name-patterns-for-fp32-local-accumulation+=
--no-create-attention-mask-in-dataloader --use-pytorch-profiler --log-validation-ppl-to-tensorboard --disable-msc
--no-one-logger --use-dist-ckpt --ckpt-fully-parallel-save --dist-ckpt-optim-fully-reshardable
[ignored] initial weights depend on neither device nor layout
--use-cpu-initialization --init-model-with-meta-device
[ignored] weights are always initialised; a checkpoint replaces them
--no-initialization
[ignored] random numbers are a hash of seed and position; there is no generator
--te-rng-tracker --inference-rng-tracker
[ignored] no effect: the scaling cancels out, and the softmax is in fp32 anyway
--apply-query-key-layer-scaling
[ignored] vocabulary padding never affects the loss
--padded-vocab-size= --no-pad-vocab-size/--disable-pad-vocab-size
[ignored] megalite always checks this: see --nan-action
--no-check-for-nan-in-loss-and-grad
[ignored] --position-embedding-type rope and none have no position table
--no-position-embedding
[ignored] pad tokens are never guessed from ids
--allow-ambiguous-pad-tokens
[ignored] a check of the run that megalite does not make; results do not depend on it
--check-for-large-grads --check-for-spiky-loss --check-weight-hash-across-dp-replicas-interval=
--gpu-sniff-test-interval= --rerun-mode= --error-injection-type= --test-mode --verify-integrity
[ignored] reporting only
--profile-ranks+= --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack
--pytorch-profiler-collect-chakra --record-memory-history --memory-snapshot-path= --record-shapes --nvtx-ranges
--log-progress --timing-log-option= --tensorboard-queue-size= --log-timers-to-tensorboard
--no-log-loss-scale-to-tensorboard/--disable-log-loss-scale-to-tensorboard --log-memory-interval=
--log-device-memory-used --log-max-attention-logit --no-barrier-with-level-1-timing --log-world-size-to-tensorboard
--logging-level= --log-energy --config-logger-dir= --otel-enabled --otel-service-name= --otel-span-groups=
--one-logger-project= --one-logger-run-name= --one-logger-async --app-tag-run-name= --app-tag-run-version=
--log-straggler --straggler-ctrlr-port= --straggler-minmax-count= --disable-straggler-on-startup
--run-workload-inspector-server --flight-recorder-dump-path= --flight-recorder-trace-buffer-size=
--no-flight-recorder-dump-on-timeout/--disable-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace
--no-flight-recorder-include-only-active/--disable-flight-recorder-include-only-active
--no-flight-recorder-extra-dump-on-exec/--disable-flight-recorder-extra-dump-on-exec
[ignored] set WANDB_DIR or WANDB_ENTITY in the environment
--wandb-save-dir= --wandb-entity=
[ignored] NVIDIA's own cluster only
--adlr-autoresume --adlr-autoresume-interval=
[ignored] --exit-signal-handler covers this
--exit-signal-handler-for-dataloader --exit-signal-handler-for-training
[ignored] changes how checkpoint files are written and read, not their content
--dist-ckpt-strictness= --auto-detect-ckpt-format --no-ckpt-fully-parallel-save --async-strategy=
--use-persistent-ckpt-worker --async-ckpt-cpu-priority= --async-ckpt-io-priority= --async-ckpt-use-cpu-shm
--ckpt-fully-parallel-load --ckpt-fully-parallel-load-exchange-algo= --ckpt-fully-parallel-load-per-rank-objects
--ckpt-fully-parallel-load-process-group= --ckpt-fully-parallel-save-process-group= --ckpt-assume-constant-structure
--ckpt-pg-tensors-cache-path= --ckpt-pg-tensors-cache-create
--no-ckpt-load-validate-sharding-integrity/--disable-ckpt-load-validate-sharding-integrity
--no-strict-fsdp-dtensor-load/--disable-strict-fsdp-dtensor-load --dist-ckpt-save-pre-mcore-014
--distrib-optim-fully-reshardable-mem-efficient --no-save-tokenizer-assets/--disable-save-tokenizer-assets
--dist-ckpt-workers= --ckpt-drop-redundant-extra-state --ckpt-convert-update-legacy-dist-opt-format
[ignored] has an effect only with --perform-rl-step, which megalite refuses
--rl-prompts-per-eval= --rl-generation-lag= --rl-max-inflight-requests= --rl-submission-granularity=
--rl-consumption-granularity= --rl-durable-rollout-bank --rl-rollout-bank-dir= --rl-rollout-bank-max-bytes=
--rl-default-temperature= --rl-default-top-p= --rl-default-top-k= --rl-offload-optimizer-during-inference
--rl-kv-cache-management-mode= --rl-persist-cuda-graphs/--no-rl-persist-cuda-graphs
--rl-partial-rollouts/--no-rl-partial-rollouts
--rl-inference-logprobs-is-correction/--no-rl-inference-logprobs-is-correction
--rl-importance-sampling-truncation-coef= --rl-use-sequence-packing/--no-rl-use-sequence-packing
--rl-sequence-packing-max-sequences-per-bin= --rl-sequence-packing-algo=
--rl-training-cuda-graphs/--no-rl-training-cuda-graphs --rl-inference-tensor-model-parallel-size=
--rl-inference-pipeline-model-parallel-size= --rl-inference-expert-model-parallel-size=
--rl-inference-expert-tensor-model-parallel-size= --rl-inference-model-unified-memory-level=
--rl-offload-inference-model-weights-when-idle/--no-rl-offload-inference-model-weights-when-idle
--rl-verify-model-weights-swap/--no-rl-verify-model-weights-swap --rl-skip-bos-token/--no-rl-skip-bos-token
--rl-profile --rl-profile-dir= --rl-inference-parsers*= --grpo-prompts-per-step= --grpo-group-size= --grpo-iterations=
--grpo-clamp-eps-lower= --grpo-clamp-eps-upper= --grpo-kl-beta= --grpo-entropy-term-weight=
--grpo-filter-groups-with-same-reward --langrl-env-config= --refit-method=
[ignored] generation only
--moe-pad-experts-for-cuda-graph-inference --inference-cuda-graph-scope= --inference-fuse-tp-communication
--inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend= --inference-moe-disable-fused-quant-kernels
--inference-moe-token-dispatcher-type= --inference-batch-times-seqlen-threshold= --inference-max-requests=
--inference-max-seq-length= --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb=
--inference-dynamic-batching-paused-buffer-size-gb= --inference-dynamic-batching-mamba-memory-ratio=
--inference-dynamic-batching-block-size= --inference-dynamic-batching-max-requests=
--inference-dynamic-batching-max-tokens= --inference-dynamic-batching-num-cuda-graphs=
--inference-dynamic-batching-track-paused-request-events --inference-dynamic-batching-track-generated-token-events
--inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens=
--inference-dynamic-batching-unified-memory-level=
--inference-dynamic-batching-prefix-caching/--no-inference-dynamic-batching-prefix-caching
--inference-dynamic-batching-prefix-caching-eviction-policy=
--inference-dynamic-batching-prefix-caching-coordinator-policy=
--inference-dynamic-batching-prefix-caching-routing-alpha= --inference-dynamic-batching-prefix-caching-mamba-gb=
--inference-dynamic-batching-cuda-graph-mixed-prefill-count=
--inference-dynamic-batching-cuda-graph-sizing-distribution= --inference-dynamic-batching-sampling-backend=
--inference-dynamic-batching-async-sched-mode= --inference-dynamic-batching-logprobs-mode=
--inference-logging-step-interval= --inference-text-gen-server-logging/--no-inference-text-gen-server-logging
--inference-wandb-logging/--no-inference-wandb-logging --inference-coordinator-port=
--mamba-inference-conv-states-dtype= --mamba-inference-ssm-states-dtype=
--inference-use-synchronous-zmq-collectives/--no-inference-use-synchronous-zmq-collectives
--inference-disable-ep-consensus/--no-inference-disable-ep-consensus --inference-shards= --max-tokens-to-oom=
--use-legacy-static-engine --decode-only-cuda-graphs --enable-chunked-prefill --num-speculative-tokens=
--use-same-sampling-seed-across-dp-ranks --flash-decode --nccl-all-reduce-for-prefill --mlp-chunks-for-prefill=
--chat-template= --cache-mla-latents
[ignored] has an effect only with --non-persistent-save-interval, which megalite refuses
--non-persistent-ckpt-type= --non-persistent-global-ckpt-dir= --non-persistent-local-ckpt-dir=
--non-persistent-local-ckpt-algo= --replication --replication-jump= --replication-factor=
[ignored] has an effect only with --num-experts, which megalite refuses
--overlap-moe-expert-parallel-comm --moe-shared-expert-intermediate-size= --moe-shared-expert-gate
--moe-shared-expert-overlap --moe-shared-expert-glu-interleave-size= --moe-ffn-hidden-size= --moe-router-topk=
--moe-enable-routing-replay --moe-router-padding-for-quantization --moe-router-padding-for-fp8
--moe-router-num-groups= --moe-router-group-topk= --moe-router-pre-softmax --moe-router-topk-scaling-factor=
--moe-router-score-function= --moe-router-dtype= --moe-router-enable-expert-bias --moe-router-bias-update-rate=
--moe-router-quantile-balancing-ema= --moe-router-force-load-balancing --moe-router-force-biased= --moe-grouped-gemm
--moe-use-grouped-tensor --moe-single-grouped-weight --moe-single-grouped-bias --moe-z-loss-coeff=
--moe-input-jitter-eps= --moe-token-dispatcher-type= --moe-enable-deepep --moe-flex-dispatcher-backend=
--moe-permute-fusion-into-hybridep --moe-hybridep-pad-uneven-dispatch-inputs --moe-per-layer-logging
--moe-expert-capacity-factor= --moe-pad-expert-input-to-capacity --moe-token-drop-policy= --moe-layer-recompute
--moe-permute-fusion --moe-router-fusion --moe-apply-probs-on-input --moe-latent-size= --moe-flex-dispatcher-num-sms=
--moe-deepep-num-sms= --moe-hybridep-num-sms= --moe-hybridep-num-blocks-permute= --moe-hybridep-num-blocks-unpermute=
--moe-hybridep-num-sms-preprocessing= --moe-ncclep-zero-copy --moe-dispatch-fwd-dtype= --moe-combine-bwd-dtype=
--moe-mlp-glu-interleave-size= --moe-expert-rank-capacity-factor= --moe-paged-stash --moe-paged-stash-page-size=
--moe-paged-stash-buffer-size-factor-cuda= --moe-paged-stash-buffer-size-factor-cpu= --moe-layer-freq=
--moe-router-load-balancing-type+= --moe-aux-loss-coeff+= --moe-upcycling-granularity= --moe-routing-trace-path=
--moe-routing-trace-max-training-iters= --moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states
--moe-routing-trace-dump-weights --expert-tensor-parallel-size= --overlap-dispatch-backward-with-experts-wgrad
--ep-overlap-early-attn-memory-release --high-priority-a2a-comm-stream --use-grouped-gemm-for-shared-expert
--gtp-expert-remat-nccl-ub
[ignored] has an effect only with --tensor-parallel-num-weight-shards, which megalite refuses
--gtp-remat-opt-in-modules+= --gtp-remat-reduce-scatter-with-fp32-accumulation --gtp-remat-nccl-ub
[ignored] has an effect only with --multi-latent-attention, which megalite refuses
--q-lora-rank= --kv-lora-rank= --qk-head-dim= --qk-pos-emb-head-dim= --v-head-dim= --rotary-scaling-factor= --mscale=
--mscale-all-dim= --mla-down-proj-fusion
[ignored] has an effect only with --experimental-attention-variant, which megalite refuses
--dsa-indexer-n-heads= --dsa-indexer-head-dim= --dsa-indexer-topk= --dsa-indexer-topk-freq=
--dsa-indexer-skip-topk-offset= --dsa-indexer-loss-coeff= --dsa-indexer-use-sparse-loss --dsa-kernel-backend=
--dsa-indexer-rope-interleaved --dsa-indexer-k-norm-epsilon= --dsa-indexer-k-norm-fp32
--no-dsa-indexer-rotate-activation/--disable-dsa-indexer-rotate-activation
--no-dsa-indexer-scoring-relu/--disable-dsa-indexer-scoring-relu --linear-conv-kernel-dim= --linear-key-head-dim=
--linear-value-head-dim= --linear-num-key-heads= --linear-num-value-heads=
[ignored] has an effect only with --qk-clip, which megalite refuses
--qk-clip-alpha= --qk-clip-threshold=
[ignored] has an effect only with --position-embedding-type mrope or relative, which megalite refuses
--relative-attention-num-buckets= --relative-attention-max-distance=
--mrope-section+=
[ignored] this is the default; --no-yarn-correction-range-round-to-int turns it off
--yarn-correction-range-round-to-int
[ignored] has an effect only with --hybrid-layer-pattern, which megalite refuses
--mamba-state-dim= --mamba-head-dim= --mamba-num-groups= --mamba-num-heads= --mamba-training-ssm-states-dtype=
--disable-mamba-mem-eff-path --gdp-num-householder= --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute=
[ignored] has an effect only with --mtp-num-layers, which megalite refuses
--mtp-standalone --mtp-loss-scaling-factor= --mtp-use-repeated-layer --mtp-detach-heads --mtp-hsm
--mtp-hybrid-override-pattern=
[ignored] has an effect only with --enable-mhc-connections, which megalite refuses
--mhc-num-residual-streams= --mhc-sinkhorn-iterations= --mhc-init-gating-factor= --mhc-recompute-layer-num=
[ignored] has an effect only with --use-mup, which megalite refuses
--mup-width-mult= --mup-base-hidden-size= --mup-embedding-mult= --mup-output-mult= --mup-base-head-dim=
--mup-attn-scale-power=
[ignored] has an effect only with --optimizer muon or lion, which megalite refuses
--muon-momentum= --muon-no-split-qkv --muon-nesterov --muon-scale-mode= --muon-fp32-matmul-prec=
--muon-coefficient-type= --muon-num-ns-steps= --muon-tp-mode= --muon-use-syrk --muon-extra-scale-factor=
--muon-scalar-optimizer= --lion-beta1= --lion-beta2=
[ignored] has an effect only with --use-precision-aware-optimizer, which megalite refuses
--main-grads-dtype= --main-params-dtype= --exp-avg-dtype= --exp-avg-sq-dtype=
[ignored] has an effect only with --use-megatron-fsdp or --use-torch-fsdp2, which megalite refuses
--megatron-fsdp-version= --fsdp-manual-registration --fsdp-double-buffer --torch-fsdp2-no-reshard-after-forward
--megatron-fsdp-main-params-dtype= --megatron-fsdp-main-grads-dtype= --megatron-fsdp-grad-comm-dtype=
--megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
--fsdp-db-use-persist-buf-on-alloc-fail --enable-full-sharding-in-hsdp
[ignored] has an effect only with --fp4-format, which megalite refuses
--fp4-recipe= --fp4-quantizer-factory= --fp4-param-gather
[ignored] has an effect only with --use-kitchen-attention, which megalite refuses
--kitchen-attention-backend=
[ignored] has an effect only with --batch-invariant-mode, which megalite refuses
--batch-invariant-backend=
[ignored] has an effect only with --hybrid-context-parallel, which megalite refuses
--max-seqlen-per-dp-cp-rank=
[ignored] has an effect only with --fine-grained-activation-offloading, which megalite refuses
--offload-modules+= --min-offloaded-tensor-size= --delay-offload-until-cuda-graph
--delta-offload-bytes-across-pp-ranks= --activation-offload-fraction= --fine-grained-offloading-max-inflight-offloads=
[ignored] has an effect only with --cpu-offloading-num-layers, which megalite refuses
--cpu-offloading-retain-pinned-cpu-buffers
[ignored] has an effect only with --fim-data, which megalite refuses
--fim-rate= --fim-spm-rate= --fim-split-sample= --fim-fragment-rate= --fim-no-prefix= --fim-prefix-token=
--fim-middle-token= --fim-suffix-token= --fim-pad-token= --fim-eod-token=
[ignored] has an effect only with --sft, which megalite refuses
--sft-tokenizer-prompt-format=
[ignored] has an effect only with --logits-save-dir or --logits-load-dir, which megalite refuses
--logits-save-top-k= --logits-save-top-p= --logits-save-top-p-min-k= --logits-save-dtype=
--logits-load-decode-threads= --logits-load-prefetch-factor= --logits-load-msc-prefetch-depth=
--logits-load-kd-loss-alpha= --logits-load-ignore-errors
[ignored] has an effect only with --inprocess-restart or --enable-ft-package, which megalite refuses
--inprocess-max-iterations= --inprocess-monitor-thread-interval= --inprocess-monitor-process-interval=
--inprocess-progress-watchdog-interval= --inprocess-heartbeat-interval= --inprocess-soft-timeout=
--inprocess-hard-timeout= --inprocess-heartbeat-timeout= --inprocess-barrier-timeout= --inprocess-completion-timeout=
--inprocess-last-call-wait= --inprocess-termination-grace-time= --inprocess-granularity=
--inprocess-active-world-size= --inprocess-empty-cuda-cache --calc-ft-timeouts --ft-num-warmup-iters=
[ignored] has an effect only with --fault-injector-ranks or --fault-injector-num-ranks, which megalite refuses
--fault-injector-fault-types= --fault-injector-fault-probabilities= --fault-injector-fault-delay=
--fault-injector-delay-start-iteration= --fault-injector-mtti-seconds= --fault-injector-offset-seconds=
--fault-injector-seed=
[ignored] for models that pretrain_gpt.py does not train: BERT, retrieval, vision
--onnx-safe= --bert-no-binary-head --bert-load= --bert-embedder-type= --output-bert-embeddings --sample-rate=
--mask-prob= --short-seq-prob= --ict-head-size= --ict-load= --biencoder-projection-dim=
--biencoder-shared-query-context-model --titles-data-path= --query-in-block-prob= --use-one-sent-docs
--evidence-data-path= --retriever-report-topk-accuracies+= --retriever-score-scaling --block-data-path=
--embedding-path= --indexer-batch-size= --indexer-log-interval= --num-classes= --img-h= --img-w= --num-channels=
--patch-dim= --classes-fraction= --data-per-class-fraction= --no-data-sharding --head-lr-mult=
--vision-pretraining-type= --vision-backbone-type= --swin-backbone-type= --mask-type= --mask-factor= --iter-per-epoch=
--dino-local-img-size= --dino-local-crops-number= --dino-head-hidden-size= --dino-bottleneck-size=
--dino-freeze-last-layer= --dino-norm-last-layer --dino-warmup-teacher-temp= --dino-teacher-temp=
--dino-warmup-teacher-temp-epochs=
[ignored] megalite has no experimental features
--enable-experimental
[changes results] other kinds of attention
--multi-latent-attention --experimental-attention-variant= --linear-attention-freq= --softmax-type=vanilla
--qk-l2-norm --qk-clip --attention-output-gate --use-kitchen-attention --window-attn-skip-freq=
[changes results] other kinds of positions
--rope-type=rope --no-rope-freq=
[changes results] layers that GPT does not have
--hybrid-layer-pattern= --hybrid-override-pattern= --is-hybrid-model --heterogeneous-layers-config-path=
--heterogeneous-layers-config-encoded-json= --spec*=local --enable-mhc-connections
--apply-residual-connection-post-layernorm --quick-geglu --glu-linear-offset=0.0 --activation-func-clamp-value=
--decoder-num-layers= --decoder-seq-length=
[changes results] multi-token prediction
--mtp-num-layers=0
[changes results] another weight initialisation
--use-mup --embedding-init-method-std= --init-method-xavier-uniform --data-parallel-random-init
[changes results] other update rules
--apply-wd-to-qk-layernorm --no-weight-decay-cond-type= --freeze-all-layers --iterations-to-skip+=
--result-rejected-tracker-filename= --decrease-batch-size-if-needed --phase-transition-iterations=
[changes results] number formats that megalite does not have
--fp32-residual-connection --fp16-lm-cross-entropy --output-logit-dtype= --disable-bf16-reduced-precision-matmul
--fp8-quantizer-factory= --no-fp8-wgrad/--disable-fp8-wgrad --fp8-output-proj --num-layers-at-start-in-bf16=1
--num-layers-at-end-in-bf16=1 --fp4-format= --te-precision-config-file= --use-precision-aware-optimizer
--ddp-reduce-scatter-with-fp32-accumulation
[changes results] other training tasks
--perform-rl-step --fim-data --vision-pretraining --logits-load-dir=
[changes results] vocabulary and special tokens come only from the tokenizer
--vocab-extra-ids=0 --null-tokenizer-eod-id= --null-tokenizer-pad-id=-1 --tokenizer-metadata=
--tokenizer-special-tokens+= --tiktoken-num-special-tokens=1000 --tokenizer-sentencepiece-legacy
--no-tokenizer-sentencepiece-ignore-extra-whitespaces/--disable-tokenizer-sentencepiece-ignore-extra-whitespaces
--tokenizer-hf-no-include-special-tokens
[changes results] another sample order
--mid-level-dataset-surplus=0.005
[not built] mixture of experts
--num-experts=0 --moe-use-upcycling
[not built] running code that comes with a tokenizer
--trust-remote-code
[not built] other kinds of parallelism
--tensor-parallel-num-weight-shards= --expert-tensor-parallel-num-weight-shards=
--hierarchical-context-parallel-sizes+= --hybrid-context-parallel --cp-comm-type+=p2p
--pipeline-model-parallel-layout= --outer-dp-sharding-strategy=no_shard --fake-process-group
[not built] other ways to save memory
--distribute-saved-activations --cpu-offloading-num-layers=0 --fine-grained-activation-offloading
[not built] bitwise equal results for every batch size
--batch-invariant-mode
[not built] evaluation with other batches than training's
--start-eval-at-iter= --eval-global-batch-size= --eval-micro-batch-size= --multiple-validation-sets
--validation-set-names+=
[not built] other sources of data
--per-split-data-args-path= --object-storage-cache-path= --enable-msc
[not built] other sources of settings
--yaml-cfg= --use-mp-args-from-checkpoint-args
--no-use-tokenizer-model-from-checkpoint-args/--disable-use-tokenizer-model-from-checkpoint-args
[not built] other checkpoint formats, or saves at other times than --save-interval
--ckpt-format=torch_dist|torch_dcp --dist-ckpt-format=torch_dist|torch_dcp --ckpt-convert-format= --ckpt-convert-save=
--non-persistent-save-interval= --load-main-params-from-ckpt --override-ckpt-iteration=
[not built] writing other files during training
--save-params-interval= --save-activations-interval= --save-tokens-per-expert-interval= --save-wgrads-interval=
--save-dgrads-interval= --logits-save-dir= --dump-param-to-param-group-map=
[not built] restarts and fault injection
--inprocess-restart --enable-ft-package --error-injection-rate=0 --fault-injector-ranks= --fault-injector-num-ranks=
[not built] other signals than SIGTERM and SIGINT
--exit-signal=SIGTERM
[use instead] --micro-batch-size
--batch-size=
[use instead] --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples
--warmup=
[use instead] --tensor-model-parallel-size
--model-parallel-size=
[use instead] --recompute-activations, or --recompute-granularity and --recompute-method
--checkpoint-activations
[use instead] --data-parallel-sharding-strategy optim_grads_params
--use-megatron-fsdp --use-torch-fsdp2
[use instead] finetune.py with --sft-data
--sft
[use instead] --reset-attention-mask
--dataloader-inter-document-masking
"""

EARLIER = """
[use instead] --recompute-method
--activations-checkpoint-method=
[use instead] --recompute-num-layers
--activations-checkpoint-num-layers=
[use instead] --fp8-format hybrid
--fp8-hybrid
[use instead] --fp8-format e4m3
--fp8-e4m3
[ignored] speed only: megalite arranges its communication itself
--DDP-impl= --use-contiguous-buffers-in-local-ddp --no-contiguous-buffers-in-local-ddp
--no-async-tensor-model-parallel-allreduce --no-scatter-gather-tensors-in-pipeline --delay-grad-reduce
--no-delay-grad-reduce --delay-param-gather
[ignored] megalite always does this
--no-query-key-layer-scaling --log-batch-size-to-tensorboard --log-learning-rate-to-tensorboard
[ignored] there is only one kind of dataset
--data-impl=
"""
