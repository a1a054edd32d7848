# Run an autograder in Gradescope's form: /lab/staff is its directory, /lab/code the student's files.
# /autograder is in memory, since autograders write to their own directory.
mkdir -p /autograder/source /autograder/submission /autograder/results
cp -R /lab/staff/. /autograder/source/
cp -R /lab/code/. /autograder/submission/
cp /autograder/source/run_autograder /autograder/run_autograder
chmod +x /autograder/run_autograder
# Some autograders read it. It names nobody.
printf '{"assignment": {"total_points": "%s"}, "users": [], "previous_submissions": []}\n' \
  "$LABCTL_POINTS" > /autograder/submission_metadata.json
cd /autograder || exit 1
./run_autograder || echo "run_autograder ended with $?" >&2
[ -f results/results.json ] || { echo "run_autograder wrote no results/results.json" >&2; exit 1; }
cp results/results.json "$LABCTL_RESULTS"
