
#!/bin/bash
#SBATCH --nodes=4 --gres=gpu:8   # of the cluster
TP=${1:-8}; PP=$((TP * 2))
LAYERS=$(( PP*6 ))
MODEL_ARGS=(
    --num-layers $LAYERS   # a comment
    "--name two words" '--literal $TP'
)
if [ "$PP" -gt 8 ] && [[ -n "${TP}" ]]; then MODEL_ARGS+=(--deep); else MODEL_ARGS+=(--shallow); fi
case $TP in 4|8) EXTRA="--even 1" ;; *) EXTRA="--odd" ;; esac
launch() { torchrun --nproc_per_node $1 train.py "${MODEL_ARGS[@]}" $EXTRA ${MISSING} 2>&1 | tee log; }
for size in small large; do SIZE=$size; done
touch /tmp/must-not-exist-$$
launch 8
bash -c "other --x 1 --y ${TP}"
cat <<EOT > ds.json
{"stage": ${TP}}
EOT
