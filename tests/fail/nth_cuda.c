/* nth_cuda.c - the same for CUDA's runtime (nth.h), for a build that has it as a shared library.
 * Knows no header of CUDA: a call is counted, and either goes on to the function behind it with
 * its arguments where they are, or ends with an error. Any thread. */
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>

#include "tests/fail/cuda.h"
#include "tests/fail/nth.h"

#define CUDA_OUT_OF_MEMORY 2

/* Integer arguments are in registers, or above the return address; there are no others. */
#define TRAMPOLINE(name, next)                                                                     \
    __asm__(".text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n"                    \
            "pushq %rdi\npushq %rsi\npushq %rdx\npushq %rcx\npushq %r8\npushq %r9\n"               \
            "subq $8, %rsp\nleaq 9f(%rip), %rdi\ncall " #next "\naddq $8, %rsp\n"                  \
            "popq %r9\npopq %r8\npopq %rcx\npopq %rdx\npopq %rsi\npopq %rdi\n"                     \
            "testq %rax, %rax\njz 8f\njmp *%rax\n8: jmp nth_cuda_error\n"                          \
            ".section .rodata\n9: .string \"" #name "\"\n.text\n");
#define CALL(name) TRAMPOLINE(name, nth_cuda_next)
#define LOOK(name) TRAMPOLINE(name, nth_cuda_next_look)
NTH_CUDA_FUNCTIONS(CALL)
NTH_CUDA_LOOKS(LOOK)

static __thread int error __attribute__((tls_model("initial-exec")));

static void *go_on(enum nth_kind kind, const char *name) {
    int before = errno;
    void *next = nth_fails(kind, name, CUDA_OUT_OF_MEMORY) ? NULL : dlsym(RTLD_NEXT, name);
    error = errno;
    if (next)
        errno = before;
    return next;
}

/* The function to go on to; NULL: it fails. */
__attribute__((used)) void *nth_cuda_next(const char *name);
void *nth_cuda_next(const char *name) { return go_on(NTH_CUDA, name); }

__attribute__((used)) void *nth_cuda_next_look(const char *name);
void *nth_cuda_next_look(const char *name) { return go_on(NTH_CUDA_LOOK, name); }

__attribute__((used)) int nth_cuda_error(void);
int nth_cuda_error(void) { return error; }
