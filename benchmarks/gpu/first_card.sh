#!/usr/bin/env bash
# The first quarter of an hour on a graphics card: does everything run there, and as fast as it should?
#
#   benchmarks/gpu/first_card.sh OUT                     # the usual parts, within nine minutes
#   benchmarks/gpu/first_card.sh OUT step plan:90        # these parts, one with another limit in seconds
#
# Needs PyTorch, transformers and this checkout; what else a machine without a network lacks is
# installed from wheels/*.whl beside this script (or WHEELS=FOLDER). Every part has a limit and ends
# with everything that it has started: nothing is left on the card. What was found is in OUT at once,
# so a session that is cut off loses only the part that was running. DEVICE=cpu tries it without a card.
set -u

out=${1:?usage: first_card.sh OUT [PART[:SECONDS] ...]}
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
# -P: the folder that this is started from may hold another `benchmarks`.
first_card=("$python" -P -m benchmarks.gpu.first_card)
limit=${SECONDS_IN_ALL:-570}
device=()
[ -n "${DEVICE:-}" ] && device=(--device "$DEVICE")
export PYTHONPATH="$root:$root/src${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# Ends every process that carries the mark of a part, in whatever session or group it is by now.
clean_up() {
    local environment
    for environment in /proc/[0-9]*/environ; do
        if grep -qzx "FIRST_CARD_PART=$1" "$environment" 2> /dev/null; then
            environment=${environment%/environ}
            kill -KILL "${environment#/proc/}" 2> /dev/null
        fi
    done
}

mark=
trap 'clean_up "$mark"; "${first_card[@]}" --summary "$out" > "$out/summary.txt" 2>&1; exit 143' TERM INT HUP

wheels=${WHEELS:-$here/wheels}
if compgen -G "$wheels/*.whl" > /dev/null; then
    packages=$(mktemp -d)
    "$python" -m pip install --quiet --no-index --no-deps --target "$packages" "$wheels"/*.whl \
        > "$out/wheels.log" 2>&1 || echo "first card: the wheels cannot be installed, see $out/wheels.log"
    export PYTHONPATH="$PYTHONPATH:$packages"
fi
command -v nvidia-smi > /dev/null && nvidia-smi > "$out/nvidia-smi.txt" 2>&1

parts=("$@")
if [ ${#parts[@]} = 0 ]; then
    mapfile -t parts < <("${first_card[@]}" --list)
fi
for part in "${parts[@]}"; do
    name=${part%%:*}
    seconds=${part#*:}
    [ "$seconds" = "$part" ] && seconds=120
    left=$((limit - SECONDS))
    if [ "$left" -lt 10 ]; then
        echo "$name: not begun, the $limit seconds are over" | tee -a "$out/not-begun.txt"
        continue
    fi
    [ "$seconds" -gt "$left" ] && seconds=$left
    echo "=== $name (at most $seconds s)"
    started=$SECONDS
    mark="$name.$$"
    FIRST_CARD_PART=$mark setsid timeout -k 5 "$seconds" "${first_card[@]}" "$name" \
        --out "$out" ${device[@]+"${device[@]}"} > "$out/$name.log" 2>&1 &
    wait $!
    code=$?
    clean_up "$mark"
    [ "$code" = 124 ] || [ "$code" = 137 ] && echo "it was ended after $seconds seconds" >> "$out/$name.log"
    echo "    $((SECONDS - started)) s, exit $code"
done
"${first_card[@]}" --summary "$out" > "$out/summary.txt" 2>&1
code=$?
cat "$out/summary.txt"
exit "$code"
