# Creates the environment of runs without a container, for `image: {python: ..., requirements: ...}`:
# that Python, and the packages of requirements.txt or pyproject.toml. labctl runs it on the server with
# sh, in the directory that has the lists. ENVIRONMENT is the directory to create, TOOLS one for programs
# of labctl's own, FILE the list, and PYTHON the version, "" for that of the server.
# uv does not read pip's configuration, so the settings of the server's account are passed on.
set -eu
export UV_SYSTEM_CERTS=1 UV_PYTHON_PREFERENCE=system UV_PYTHON_INSTALL_DIR="$TOOLS/python"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Beside the environment, since /tmp may be small: uv only links what it unpacks on the same disk.
cache="${ENVIRONMENT%/*}/cache"
mkdir -p "$cache"
export UV_CACHE_DIR="$cache" TMPDIR="$cache"
# A version that comes from git's tags is not known here: labctl sends no .git.
export SETUPTOOLS_SCM_PRETEND_VERSION=0
# With it, setuptools installs the lab's own code as a line in a .pth file, as others do. Each run finds
# its own copy of the code by that.
export PIP_CONFIG_SETTINGS=editable_mode=compat

find_uv() {
  for uv in "$(command -v uv || :)" "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv" "$TOOLS/uv"; do
    [ ! -x "$uv" ] || return 0
  done
  uv=
}

# A wheel of uv has the program itself, so a wheelhouse needs no pip.
unpack_uv() {
  for wheel in "${PIP_FIND_LINKS:-.}"/uv-*_"$(uname -m)".whl; do
    [ ! -f "$wheel" ] || python3 -m zipfile -e "$wheel" "$1"
  done
  set -- "$1"/uv-*.data/scripts/uv
  [ -f "$1" ] && chmod 755 "$1" && mv -f "$1" "$TOOLS/uv"
}

install_uv() {
  if python3 -m pip --version >/dev/null 2>&1; then
    python3 -m pip install --quiet --no-cache-dir --target "$1" uv && mv -f "$1/bin/uv" "$TOOLS/uv"
  elif python3 -m venv "$1" >/dev/null 2>&1; then
    "$1/bin/python" -m pip install --quiet --no-cache-dir uv && mv -f "$1/bin/uv" "$TOOLS/uv"
  else
    return 1
  fi
}

find_uv
if [ -z "$uv" ]; then
  echo "Step 1/3 : RUN pip install uv"
  mkdir -p "$TOOLS"
  new=$(mktemp -d "$TOOLS/uv-XXXXXX")
  unpack_uv "$new" || install_uv "$new" || echo "uv could not be installed; pip and venv take its place."
  rm -rf "$new"
  find_uv
fi

if [ -n "$uv" ]; then
  echo "Step 2/3 : RUN uv venv ${PYTHON:+--python $PYTHON}"
  if ! "$uv" venv ${PIP_NO_INDEX:+--no-python-downloads} ${PYTHON:+--python "$PYTHON"} \
      "$ENVIRONMENT"; then
    echo "This server has $(python3 -V), and Python $PYTHON could not be downloaded."
    echo "In lab.yaml, set image.python to a version that is available."
    exit 1
  fi
  # pip is there for people who type `pip install` in a run.
  "$ENVIRONMENT/bin/python" -m ensurepip --default-pip >/dev/null 2>&1 || :
else
  python=python3
  ! command -v "python${PYTHON:-3}" >/dev/null || python=python${PYTHON:-3}
  case "$("$python" -V) " in
    "Python ${PYTHON:-3}"[.\ ]*) ;;
    *)
      echo "This server has $(python3 -V), and Python $PYTHON needs uv, which could not be installed."
      echo "In lab.yaml, set image.python to a version that is available."
      exit 1
      ;;
  esac
  echo "Step 2/3 : RUN $python -m venv"
  if ! "$python" -m venv "$ENVIRONMENT"; then
    echo "This server has neither uv nor a Python that creates environments. Put the program uv into"
    echo "~/.local/bin there, or ask its administrator to install venv (on Debian: python3-venv)."
    exit 1
  fi
fi

read_pip_setting() {
  for python in "$ENVIRONMENT/bin/python" python3; do
    "$python" -m pip config get "global.$1" 2>/dev/null && return || :
  done
}

echo "Step 3/3 : RUN ${uv:+uv }pip install --requirements $FILE"
if [ -z "$uv" ]; then
  "$ENVIRONMENT/bin/python" -m pip install --no-cache-dir --requirement "$FILE"
  rm -rf "$cache"
  exit
fi
if [ -z "${PIP_NO_INDEX:-}" ]; then
  : "${PIP_INDEX_URL:=$(read_pip_setting index-url)}"
  : "${PIP_EXTRA_INDEX_URL:=$(read_pip_setting extra-index-url)}"
  : "${PIP_FIND_LINKS:=$(read_pip_setting find-links)}"
  export UV_INSECURE_HOST="${UV_INSECURE_HOST:-$(read_pip_setting trusted-host)}"
fi
# pip separates several addresses by spaces or lines.
set -- ${PIP_NO_INDEX:+--no-index}
[ -z "${PIP_INDEX_URL:-}" ] || set -- "$@" --default-index "$PIP_INDEX_URL"
for address in ${PIP_EXTRA_INDEX_URL:-}; do set -- "$@" --index "$address"; done
for address in ${PIP_FIND_LINKS:-}; do set -- "$@" --find-links "$address"; done
# The best version of all indexes counts, as with pip.
"$uv" pip install --python "$ENVIRONMENT/bin/python" --compile-bytecode \
  --index-strategy unsafe-best-match --config-setting "$PIP_CONFIG_SETTINGS" "$@" --requirements "$FILE"
rm -rf "$cache"
