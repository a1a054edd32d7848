"""Lines for the server's shell that enter a run: a command beside it, or its first terminal."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.shell import command as render_words
from labctl.wire.runs import DOCKER, SLURM

# Replaces the remote shell with `docker exec`. Docker's own error for a container that has ended
# would exit with 1, as the user's command may.
_DOCKER_EXEC = """\
if [ "$(docker inspect --format '{{{{.State.Running}}}}' {attempt})" = true ]
then {exec}
fi
echo {message} >&2
echo {next} >&2
exit 255
"""
# The first process of the attempt writes its number down.
_PROCESS_EXEC = """\
attempt=$HOME/labctl/.attempts/{attempt}
process=$(sed -n 's/.*"pid":\\([0-9]*\\).*/\\1/p' "$attempt/process.json" 2>/dev/null)
if [ -n "$process" ] && kill -0 "$process" 2>/dev/null
then exec env LABCTL_ENTER=1 sh "$attempt/enter.sh" {command}
fi
echo {message} >&2
echo {next} >&2
exit 255
"""
# A step of the run's job, on its machine.
_SLURM_EXEC = """\
attempt=$HOME/labctl/.attempts/{attempt}
job=$(sed -n 's/.*"job_id":"\\([0-9]*\\)".*/\\1/p' "$attempt/attempt.json" 2>/dev/null)
if [ -n "$job" ] && [ "$(squeue -h -j "$job" -o %T 2>/dev/null)" = RUNNING ]
then exec srun --quiet --overlap {flags}--jobid="$job" "$attempt/step.sh" {command}
fi
echo {message} >&2
echo {next} >&2
exit 255
"""
# Starts an attempt that was created before, with this terminal. Its script replaces the shell.
_PROCESS_START = """\
attempt=$HOME/labctl/.attempts/{attempt}
[ ! -x "$attempt/start.sh" ] || exec "$attempt/start.sh"
echo {message} >&2
echo {next} >&2
exit 255
"""
# Starts a container that was created before, with this terminal. If the engine refuses the start,
# Docker exits with 1, as the user's command may. Its own messages are kept apart until then.
_START = """\
{{ refusal=$({start} 2>&1 >&3); code=$?; }} 3>&1
case "$(docker inspect --format '{{{{.State.StartedAt}}}}' {attempt})" in
0001-*) ;;
*) [ -z "$refusal" ] || echo "$refusal" >&2; exit $code ;;
esac
echo {message} >&2
echo "  $refusal" >&2
echo {next} >&2
exit 255
"""


def build_exec_line(
    executor: str, run: str, attempt: str, words: Sequence[str], *, tty: bool
) -> str:
    """Return the line that runs a command beside a run, with the command's own exit code.

    It exits with 255 and says so if the run's last attempt does not run any more.
    """
    if executor == SLURM:
        return _SLURM_EXEC.format(
            attempt=render_words(attempt).render(),
            flags="--pty " if tty else "",
            command=render_words(*words).render(),
            message=render_words(f"labctl: the job of run {run} is not running").render(),
            next=render_words("  next: labctl status --refresh").render(),
        )
    if executor != DOCKER:
        return _PROCESS_EXEC.format(
            attempt=render_words(attempt).render(),
            command=render_words(*words).render(),
            message=render_words(f"labctl: the process of run {run} is not running").render(),
            next=render_words("  next: labctl status --refresh").render(),
        )
    inner = ("sh", "/lab/run/.labctl/entry.sh", *words)
    flags = ("-it" if tty else "-i", "-e", "LABCTL_ENTER=1")
    return _DOCKER_EXEC.format(
        attempt=render_words(attempt).render(),
        exec=render_words("exec", "docker", "exec", *flags, attempt, *inner).render(),
        message=render_words(f"labctl: the container of run {run} is not running").render(),
        next=render_words("  next: labctl status --refresh").render(),
    )


def build_start_line(is_container: bool, run: str, attempt: str) -> str:
    """Return the line that starts a created attempt with this terminal."""
    if not is_container:
        return _PROCESS_START.format(
            attempt=render_words(attempt).render(),
            message=render_words(f"labctl: run {run} was removed before it started").render(),
            next=render_words("  next: labctl status --refresh").render(),
        )
    return _START.format(
        start=render_words("docker", "start", "--attach", "--interactive", attempt).render(),
        attempt=render_words(attempt).render(),
        message=render_words(f"labctl: the container of run {run} did not start").render(),
        next=render_words("  next: labctl doctor").render(),
    )
