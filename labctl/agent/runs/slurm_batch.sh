# Runs one attempt as a job of Slurm; labctl writes `attempt`, `run`, `modules` and `recorder` above.
# Arguments: the command. A job that Slurm starts again runs all of this again.
meta=$run/.labctl log=$run/logs/run.log
say() { printf '%s\n' "--- $(date -u '+%Y-%m-%d %H:%M:%S UTC'): $1 ---" >>"$log"; }
# labctl gave this attempt up before Slurm began it.
[ -d "$attempt" ] || exit 125
if [ -e "$attempt/began" ]; then
  rm -rf "$attempt/started" "$attempt/stopped" "$attempt/out-of-memory"
  [ ! -e "$meta/exit.json" ] || mv "$meta/exit.json" "$meta/ended-start-${SLURM_RESTART_COUNT:-0}-exit.json"
  say "Slurm started job $SLURM_JOB_ID again, on $SLURMD_NODENAME"
fi
# A cancel may have come while the job was being started again.
[ ! -e "$meta/cancel" ] || exit 143
# Its first line is when the first start began, its time when this one did.
[ -s "$attempt/began" ] || date +%s >"$attempt/began"
touch "$attempt/began"
if [ -n "$modules" ]; then
  module load $modules >>"$log" 2>&1 || { say "module load $modules failed"; exit 126; }
fi
asked= child=
trap 'asked=$(date +%s); [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM
sh "$attempt/enter.sh" "$@" &
child=$!
[ -z "$asked" ] || kill -TERM "$child" 2>/dev/null
# Measures the run from inside the job. It has a session of its own, so that it does not count.
setsid sh -c "exec $recorder" </dev/null >/dev/null 2>&1 &
recorder_process=$!
while :; do
  wait "$child"
  code=$?
  kill -0 "$child" 2>/dev/null || break
done
if [ "$code" -gt 128 ]; then
  wait "$child" 2>/dev/null
  own=$?
  [ "$own" -eq 127 ] || code=$own
fi
kill "$recorder_process" 2>/dev/null
# Slurm sends SIGTERM shortly before the time limit, and to make room for other jobs. A command that
# saved a checkpoint then goes on in another start of the same job.
saved() { [ -n "$(find "$run/checkpoints" -type f ! -name ".*" -newer "$attempt/began" | head -n 1)" ]; }
# Prints `time` or `room`. The warning comes up to three minutes before the limit.
name_reason() {
  end=$(SLURM_TIME_FORMAT=%s squeue -h -j "$SLURM_JOB_ID" -o %e)
  case $end in "" | *[!0-9]*) echo room ;; *) [ "$((end - asked))" -gt 200 ] && echo room || echo time ;; esac
}
if [ -n "$asked" ] && [ "$code" -ne 0 ] && [ ! -e "$meta/cancel" ] &&
  [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
  reason=$(name_reason)
  if saved; then
    why="must make room"
    [ "$reason" = room ] || why="is near its time limit"
    say "job $SLURM_JOB_ID $why; it saved a checkpoint, and labctl asks Slurm to queue it again"
    # Slurm ends this script.
    if refusal=$(scontrol requeue "$SLURM_JOB_ID" 2>&1); then
      sleep 60
    else
      say "Slurm did not queue job $SLURM_JOB_ID again: $refusal"
    fi
  fi
  echo "$reason" >"$attempt/stopped"
fi
exit "$code"
