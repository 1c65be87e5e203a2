# Completion by bash(1) for the kld tool, which is asked what there is: this file knows no option by itself.
_kld() {
    local tool=${COMP_WORDS[0]} command=${COMP_WORDS[1]} word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    if ((COMP_CWORD == 1)) || { ((COMP_CWORD == 2)) && [[ $command == help ]]; }; then
        mapfile -t COMPREPLY < <(compgen -W "help $("$tool" -h 2>/dev/null | sed -n 's/^  \([a-z][a-z]*\) .*/\1/p')" -- "$word")
    elif [[ $word == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$("$tool" help "$command" 2>/dev/null | sed -n 's/^  \(--*[a-z-]*\).*/\1/p')" -- "$word")
    fi # else files, by readline
}
complete -o default -F _kld kld
