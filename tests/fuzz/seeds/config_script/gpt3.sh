#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=${SLURM_NNODES:-1}
MODEL=(--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536   # sequences
    --fp16 --clip-grad 1.0 --lr 6.0e-5
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py ${MODEL[@]} ${TRAINING[@]} \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --vocab-file $1
