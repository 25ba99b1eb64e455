#!/bin/sh
# Everything, in order; what is finished is not repeated. SCALE=small runs/all.sh: offline, on a CPU.
here=$(dirname "$0")
for script in train table_qa table_suffix figure_steps table_cross_domain table_needle table_longbench table_ablation beyond; do
  echo "== $script"
  sh "$here/$script.sh" || exit 1
done
