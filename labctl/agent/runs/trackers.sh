# Sets what MLflow and Weights & Biases need, for entry.sh, which sources this file in the run's image.
[ -z "$LABCTL_TRACK_WANDB" ] || export WANDB_DIR="${WANDB_DIR:-$LABCTL_LOG_DIR}"
mlflow_python=$(command -v python3 || command -v python)
# Of several servers, the first one tracks.
case "$LABCTL_TRACK_MLFLOW${RANK#0}" in
  "$LABCTL_TRACK_MLFLOW") ;;
  *) LABCTL_TRACK_MLFLOW= ;;
esac
use_mlflow_run() {
  MLFLOW_RUN_ID=$(cat "$LABCTL_LOG_DIR/mlflow/run-id" 2>/dev/null)
  [ -z "$MLFLOW_RUN_ID" ] || export MLFLOW_RUN_ID
}
if [ -n "$LABCTL_TRACK_MLFLOW" ]; then
  export MLFLOW_TRACKING_URI="sqlite:///$LABCTL_LOG_DIR/mlflow/mlflow.db"
  export MLFLOW_EXPERIMENT_NAME="$LABCTL_TRACK_MLFLOW"
  use_mlflow_run
fi
start_trackers() {
  [ -n "$LABCTL_TRACK_MLFLOW" ] || return 0
  unset MLFLOW_RUN_ID
  if ! "$mlflow_python" "$run/.labctl/mlflow_run.py" open >"$run/.labctl/mlflow.log" 2>&1; then
    tail -n 3 "$run/.labctl/mlflow.log"
    echo "labctl: MLflow does not track this run: add mlflow to the packages of its image"
    unset MLFLOW_TRACKING_URI MLFLOW_EXPERIMENT_NAME
    return 0
  fi
  use_mlflow_run
  "$mlflow_python" "$run/.labctl/mlflow_run.py" copy >/dev/null 2>&1 </dev/null &
  mlflow_copy=$!
}
stop_trackers() {
  [ -z "$mlflow_copy" ] || kill "$mlflow_copy" 2>/dev/null
}
