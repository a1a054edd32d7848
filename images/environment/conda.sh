# Creates the environment of runs without a container, for `image: {conda: environment.yml}`, by the
# server's micromamba, mamba or conda. labctl runs it on the server with sh, in the directory that has the
# lists. ENVIRONMENT is the directory to create, TOOLS one for files of labctl's own, and FILE the list.
set -eu
# As in pip.sh, for code of the lab in the `pip:` section.
export SETUPTOOLS_SCM_PRETEND_VERSION=0 PIP_CONFIG_SETTINGS=editable_mode=compat

find_program() {
  for name in micromamba mamba conda; do
    # A shell that no person uses has none of the paths that `conda init` sets.
    for program in "$(command -v "$name" || :)" "$HOME/.local/bin/$name" "$HOME/bin/$name" \
        "$HOME/$name/bin/$name" "$HOME/miniforge3/bin/$name" "$HOME/miniconda3/bin/$name" \
        "$HOME/anaconda3/bin/$name" "/opt/conda/bin/$name"; do
      [ ! -x "$program" ] || return 0
    done
  done
  echo "This server has no micromamba, mamba or conda, which image.conda needs."
  echo "Put the program micromamba into ~/.local/bin there."
  exit 1
}

find_program
echo "Step 1/1 : RUN $name create --file $FILE"
if [ "$name" != micromamba ]; then
  exec "$program" env create --quiet --prefix "$ENVIRONMENT" --file "$FILE"
fi
export MAMBA_ROOT_PREFIX="$TOOLS/mamba"
"$program" create --yes --prefix "$ENVIRONMENT" --file "$FILE"
"$program" clean --all --yes
