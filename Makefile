# kld: build, test, install. `make help` lists the targets; README.md explains them.
#
# Variables: BUILD (output folder), SANITIZE (empty, address, thread or coverage), CUDA (1, 0; default: 1 if nvcc is
# there), NVCC, PREFIX, DESTDIR, MANDIR, SECONDS (of each fuzz target), JOBS (files of end-to-end tests at a time; they
# mostly wait), EVERY (of the emulated table's cases, each N-th), CC (gcc), AR, V=1 for the full command lines. CFLAGS replaces -O2 -g;
# CPPFLAGS and LDFLAGS come behind what kld itself wants.

BUILD    ?= build
SANITIZE ?=
PREFIX   ?= /usr/local
NVCC     ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
CUDA     ?= $(if $(NVCC),1,0)
VERSION  := $(shell cat proto/VERSION)
# What a program and libkld.so must agree on beyond the version: the layout of the tables between them.
TABLES   := $(shell cat kernels/backend.h proto/op.h proto/status.h | cksum | cut -d' ' -f1)
COMMIT   := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
Q        := $(if $(V),,@)

# Without a name it would all go to /obj, /kld and so on, and names with blanks are several to make.
ONE_NAME  = $(if $(filter 1,$(words $($(1)))),,$(error $(1)='$($(1))' ($(origin $(1))): expected the name of one folder, without blanks))
$(call ONE_NAME,BUILD)
# What is misspelt would be another build than the one that was asked for, and its tests would pass.
ONE_OF    = $(if $(findstring |$($(1))|,|$(2)|),,$(error $(1)='$($(1))' ($(origin $(1))): expected one of $(subst |, ,$(2))$(3)))
$(call ONE_OF,SANITIZE,address|thread|coverage|,or nothing)
# Empty is not asked for: it may be a variable of the environment without a value.
ifeq ($(CUDA),)
override CUDA := $(if $(NVCC),1,0)
endif
$(call ONE_OF,CUDA,0|1)
ifeq ($(CUDA)$(strip $(NVCC)),1)
$(error CUDA=1 needs the CUDA toolkit: no nvcc in /usr/local/cuda/bin or in PATH (NVCC=FILE says where it is); without it: CUDA=0)
endif

JOBS     ?= 2
EVERY    ?= 1

# make has a CC of its own, cc, which ?= would leave as it is: what the kernels' code was measured with, where it is there.
# With -R it has none, and no AR.
ifneq ($(filter default undefined,$(origin CC)),)
CC       := $(or $(if $(shell command -v gcc 2>/dev/null),gcc),cc)
endif
ifeq ($(origin AR),undefined)
AR       := ar
endif
# All cores, unless the caller said how many.
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 2)
endif
WARN     := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith \
            -Wvla -Wwrite-strings -Wno-unused-parameter
HARDEN   := -fstack-protector-strong -fno-plt
KLD_CPPFLAGS := -I. -D_GNU_SOURCE -DKLD_RELEASE='"$(VERSION)"' -DKLD_BUILD='"$(VERSION)+$(TABLES)"' $(if $(filter 1,$(CUDA)),-DKLD_WITH_CUDA)
CFLAGS   ?= -O2 -g
ALL_CFLAGS = -std=c17 $(CFLAGS) $(WARN) $(HARDEN) -fPIC -fvisibility=hidden -pthread $(SAN_FLAGS)
KLD_LDFLAGS = -pthread -Wl,-z,relro,-z,now -pie $(SAN_FLAGS)
FORTIFY  := $(if $(findstring _FORTIFY_SOURCE,$(CPPFLAGS) $(CFLAGS)),,-D_FORTIFY_SOURCE=3)

ifeq ($(SANITIZE),address)
SAN_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
FORTIFY   :=
else ifeq ($(SANITIZE),thread)
SAN_FLAGS := -fsanitize=thread -fno-omit-frame-pointer
FORTIFY   :=
else ifeq ($(SANITIZE),coverage)
SAN_FLAGS := --coverage -fprofile-update=atomic
CFLAGS    := -O1 -g
endif
KLD_CPPFLAGS += $(FORTIFY)

# ---- sources: by folder, found by name ------------------------------------------------------------
PROTO_C    := $(filter-out proto/oip%,$(wildcard proto/*.c))
KERNELS_C  := $(wildcard kernels/*.c kernels/cpu/*.c)
CUDA_CU    := $(if $(filter 1,$(CUDA)),$(wildcard kernels/cuda/*.cu))
CUDA_C     := $(if $(filter 1,$(CUDA)),$(wildcard kernels/cuda/*.c))
CLIENT_C   := $(wildcard client/*.c)
CLI_C      := $(wildcard client/cli/*.c)
SERVER_C   := $(filter-out server/main.c,$(wildcard server/*.c server/supervisor/*.c server/worker/*.c \
              server/gateway/*.c)) $(wildcard proto/oip*.c)
EXAMPLES_C := $(wildcard client/examples/*.c)
UNIT_C     := $(shell find tests/unit -name 'test_*.c' 2>/dev/null | sort)
ifneq ($(filter address thread,$(SANITIZE)),) # which know no threads that change stacks by themselves
UNIT_C     := $(filter-out tests/unit/emulate/%,$(UNIT_C))
endif
TABLE_C    := $(wildcard tests/unit/kernels/kernel_table.c)
UNIT_AUX_C := $(filter-out $(TABLE_C),$(shell find tests/unit -name '*.c' ! -name 'test_*.c' 2>/dev/null | sort))
FAIL_C     := $(wildcard tests/fail/nth*.c)
FAILING_C  := $(wildcard tests/fail/client*.c)
FUZZ_C     := $(wildcard tests/fuzz/*.c)
BENCH_C    := $(wildcard tests/bench/*.c)

OBJ         = $(patsubst %,$(BUILD)/obj/%.o,$(1))
# CUDA objects are the same under every sanitizer: they are built once, in CUDA_BUILD.
CUDA_BUILD ?= build
$(call ONE_NAME,CUDA_BUILD)
CUDA_OBJ   := $(patsubst %,$(CUDA_BUILD)/cuda/%.o,$(CUDA_CU))
LIB_OBJ    := $(call OBJ,$(PROTO_C) $(KERNELS_C) $(CUDA_C) $(CLIENT_C))
SERVER_OBJ := $(call OBJ,$(SERVER_C))

CUDA_HOME  := $(patsubst %/bin/nvcc,%,$(NVCC))
# kernels/cuda/preload.c hears of the kernels that there are.
CUDA_WRAP  := -Wl,--wrap=__cudaRegisterFunction
CUDA_LIBS  := $(if $(filter 1,$(CUDA)),-L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt -lstdc++ $(CUDA_WRAP))
LIB_LIBS   := $(CUDA_LIBS) -lcurl -lm
SERVER_LIBS := -lmicrohttpd -lgnutls -lseccomp -lcjson -luv -lz
CHECK_LIBS := -lcheck -lsubunit -lrt

KNOWN_ARCHS = $(filter-out 5% 6% 7%,$(patsubst compute_%,%,$(if $(NVCC),$(shell $(NVCC) --list-gpu-arch 2>/dev/null))))
# Of these, those that the toolkit knows: before CUDA 12.8 none knows 100. Empty is not asked for: a container's build
# argument without a value may be such a variable in its environment.
USUAL_ARCHS := 80 86 89 90 100
ifeq ($(strip $(CUDA_ARCHS)),)
override CUDA_ARCHS := $(or $(if $(filter 1,$(CUDA)),$(filter $(KNOWN_ARCHS),$(USUAL_ARCHS))),$(USUAL_ARCHS))
endif
# More options of nvcc; CUDA_PTX_ONLY=1: no machine code, which is three quarters of the time.
NVCC_EXTRA ?=
CUDA_PTX_ONLY ?=
$(call ONE_OF,CUDA_PTX_ONLY,1|,or nothing)
# What a target compiles that is to run here and now, unless the caller said what: for the cards that are here, and
# without one the demonstration does without CUDA, and the tests compile kernels, which nothing will run, quickly and not
# well, in a seventh of the time.
CARDS     := $(wildcard /dev/nvidia[0-9]*)
ASKED      = $(filter-out undefined default file override,$(origin $(1)))
CARD_ARCHS = $(sort $(filter $(KNOWN_ARCHS),$(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null))))
FOR_CARDS  = $(if $(call ASKED,CUDA_ARCHS),,$(if $(CARD_ARCHS),CUDA_ARCHS="$(CARD_ARCHS)"))
FOR_DEMO   = $(if $(CARDS),$(FOR_CARDS),$(if $(call ASKED,CUDA),,CUDA=0))
QUICKLY    = $(if $(call ASKED,CUDA_PTX_ONLY)$(call ASKED,NVCC_EXTRA),,CUDA_PTX_ONLY=1 NVCC_EXTRA="-Xcicc -O0 -Xptxas -O0")
FOR_CHECK  = $(if $(CARDS),$(FOR_CARDS),$(QUICKLY) $(if $(call ASKED,CUDA_ARCHS),,CUDA_ARCHS=90))
NVCC_FLAGS := -O3 $(NVCC_EXTRA) -std=c++17 -I. -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-fstack-protector-strong,-D_FORTIFY_SOURCE=3 \
  -DKLD_WITH_CUDA --expt-relaxed-constexpr \
  $(if $(CUDA_PTX_ONLY),,$(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a))) \
  -gencode arch=compute_$(firstword $(CUDA_ARCHS)),code=compute_$(firstword $(CUDA_ARCHS)) \
  -gencode arch=compute_$(lastword $(CUDA_ARCHS)),code=compute_$(lastword $(CUDA_ARCHS)) \
  $(if $(NVCC),$(shell $(NVCC) --help 2>/dev/null | grep -q compress-mode && echo --compress-mode=$(if $(CUDA_PTX_ONLY),speed,size)))

.PHONY: all lib unit examples bench-programs programs metrics install dist image print-cuda print-nvcc wheel lint check check-programs check-gpu emulated bench fuzz fuzz-dist fuzz-found fuzz-coverage demo fail-nth valgrind \
  coverage clean help
all: $(BUILD)/kld-server $(BUILD)/kld $(BUILD)/libkld.so $(BUILD)/libkld.a
lib: $(BUILD)/libkld.a $(BUILD)/libkld.so

# The two vector widths of the CPU back end: the same source, chosen at run time.
$(BUILD)/obj/kernels/cpu/%_avx2.c.o: EXTRA := -mavx2 -mfma -mf16c -O3 -ffp-contract=fast
$(BUILD)/obj/kernels/cpu/%_avx512.c.o: EXTRA := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -O3 -ffp-contract=fast \
  -mprefer-vector-width=512
$(BUILD)/obj/kernels/cuda/%.c.o $(BUILD)/obj/tests/unit/kernels/cuda/%.c.o: EXTRA := $(if $(CUDA_HOME),-isystem $(CUDA_HOME)/include)

# C and CUDA that was compiled with other flags is compiled again, unless AS_BUILT is set.
.PHONY: force
$(BUILD)/flags: export KLD_STAMP = $(CC) $(KLD_CPPFLAGS) $(ALL_CFLAGS)$(if $(CPPFLAGS)$(LDFLAGS), | $(CPPFLAGS) | $(LDFLAGS))
$(CUDA_BUILD)/cuda/flags: export KLD_STAMP = $(NVCC) $(NVCC_FLAGS)
$(BUILD)/commit: export KLD_STAMP = $(COMMIT)
$(BUILD)/flags $(CUDA_BUILD)/cuda/flags $(BUILD)/commit: force
	@mkdir -p $(@D)
	@test -n "$(AS_BUILT)" -a -e $@ || printf '%s\n' "$$KLD_STAMP" | cmp -s - $@ || printf '%s\n' "$$KLD_STAMP" >$@

$(BUILD)/obj/%.c.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) $(KLD_CPPFLAGS) $(CPPFLAGS) $(ALL_CFLAGS) $(EXTRA) -MMD -MP -c $< -o $@

$(CUDA_BUILD)/cuda/%.cu.o: %.cu $(CUDA_BUILD)/cuda/flags
	@mkdir -p $(@D)
	@echo "  NVCC  $<"
	$(Q)$(NVCC) $(NVCC_FLAGS) -MMD -MP -MF $@.d -c $< -o $@

$(BUILD)/libkld.a: $(LIB_OBJ) $(CUDA_OBJ)
	@echo "  AR    $@"
	$(Q)rm -f $@ && $(AR) rcs $@ $^

# nodelete: over http: a thread of libcurl's may be asking for a name's address when its connection has gone (http.c,
# CURLOPT_QUICK_EXIT); it ends in code that dlclose() would have unmapped.
$(BUILD)/libkld.so: $(LIB_OBJ) $(CUDA_OBJ)
	@echo "  LD    $@"
	$(Q)$(CC) -shared -Wl,-soname,libkld.so.0 -Wl,-z,nodelete $(filter-out -pie,$(KLD_LDFLAGS) $(LDFLAGS)) $^ -o $@ $(LIB_LIBS)
	$(Q)ln -sf libkld.so $(BUILD)/libkld.so.0

# The kernels are in libkld.so once; programs find it beside them (build tree) or in ../lib (installed).
# What is hidden in it and small, they have of their own.
LIB_SO    := -L$(BUILD) -lkld -Wl,-rpath,'$$ORIGIN:$$ORIGIN/../lib'
PROTO_OBJ := $(call OBJ,$(PROTO_C))
$(BUILD)/kld-server: $(call OBJ,server/main.c) $(SERVER_OBJ) $(PROTO_OBJ) $(BUILD)/libkld.so
	@echo "  LD    $@"
	$(Q)$(CC) $(KLD_LDFLAGS) $(LDFLAGS) $(filter %.o,$^) -o $@ $(LIB_SO) $(SERVER_LIBS) -lm

$(BUILD)/kld: $(call OBJ,$(CLI_C)) $(PROTO_OBJ) $(BUILD)/libkld.so
	@echo "  LD    $@"
	$(Q)$(CC) $(KLD_LDFLAGS) $(LDFLAGS) $(filter %.o,$^) -o $@ $(LIB_SO) -lcjson -lm

# Examples see only the public headers and libkld.so, and compile against an installed kld as they are.
$(BUILD)/examples/%: client/examples/%.c $(BUILD)/libkld.so
	@mkdir -p $(@D)
	@echo "  LD    $@"
	$(Q)$(CC) -std=gnu17 -I. -Iclient/include $(FORTIFY) $(CPPFLAGS) $(CFLAGS) $(WARN) $(HARDEN) -fPIE $(KLD_LDFLAGS) $(LDFLAGS) $< -o $@ -L$(BUILD) -lkld -lm -Wl,-rpath,'$$ORIGIN/..'
examples: $(patsubst client/examples/%.c,$(BUILD)/examples/%,$(EXAMPLES_C))

# A unit test is one program with its own main (tests/unit/unit.h); it may call anything inside.
$(BUILD)/tests/unit/%: $(BUILD)/obj/tests/unit/%.c.o $(call OBJ,$(UNIT_AUX_C) $(filter-out client/cli/main.c,$(CLI_C))) $(SERVER_OBJ) $(BUILD)/libkld.a
	@mkdir -p $(@D)
	@echo "  LD    $@"
	$(Q)$(CC) $(KLD_LDFLAGS) $(LDFLAGS) $^ -o $@ $(SERVER_LIBS) $(LIB_LIBS) $(CHECK_LIBS)
UNIT_BIN := $(patsubst %.c,$(BUILD)/%,$(UNIT_C))
unit: $(UNIT_BIN)

$(BUILD)/bench/%: $(BUILD)/obj/tests/bench/%.c.o $(BUILD)/libkld.so
	@mkdir -p $(@D)
	$(Q)$(CC) $(KLD_LDFLAGS) $(LDFLAGS) $< -o $@ -L$(BUILD) -lkld -Wl,-rpath,'$$ORIGIN/..' $(BENCH_LIBS) -ldl -lm
$(BUILD)/bench/http_load: BENCH_LIBS := -lmicrohttpd
# Programs of the kernels alone: they also run where the servers' libraries are missing.
KERNELS_OBJ := $(call OBJ,$(PROTO_C) $(KERNELS_C) $(CUDA_C)) $(CUDA_OBJ)
$(BUILD)/libkernels.a: $(KERNELS_OBJ)
	@echo "  AR    $@"
	$(Q)rm -f $@ && $(AR) rcs $@ $^
$(BUILD)/obj/tests/bench/kernels.c.o: $(BUILD)/commit
$(BUILD)/obj/tests/bench/kernels.c.o: EXTRA := -DKLD_COMMIT='"$(COMMIT)"'
$(BUILD)/bench/kernels: $(BUILD)/obj/tests/bench/kernels.c.o $(BUILD)/libkernels.a
	@mkdir -p $(@D)
	@echo "  LD    $@"
	$(Q)$(CC) $(KLD_LDFLAGS) $(LDFLAGS) $^ -o $@ $(CUDA_LIBS) -lm
bench-programs: $(patsubst tests/bench/%.c,$(BUILD)/bench/%,$(BENCH_C))

# The case table of the kernels: one program, run against any back end.
$(BUILD)/kernel-table: $(call OBJ,$(TABLE_C) $(filter tests/unit/kernels/%,$(UNIT_AUX_C))) $(BUILD)/libkernels.a
	@echo "  LD    $@"
	$(Q)$(CC) $(KLD_LDFLAGS) $(LDFLAGS) $^ -o $@ $(CUDA_LIBS) -lm

# The same with the sources of the CUDA kernels on threads of this host (tests/emulate): no GPU, but CUDA's headers, and
# a processor with AVX2 and FMA. As on a card no kernel shares a template's function with that of another source file.
EMULATE_CU  := $(patsubst %,$(BUILD)/emulate/%.o,$(CUDA_CU))
EMULATE_CXX := -std=gnu++17 -O1 -fno-gnu-unique -march=x86-64-v3 -ffp-contract=fast -Wall -Wno-unknown-pragmas -Wno-unused-function \
  -Wno-sign-compare -Itests/emulate -I. -isystem $(CUDA_HOME)/include -DKLD_WITH_CUDA $(EMULATE_FLAGS)
$(BUILD)/obj/tests/emulate/%.c.o: EXTRA := -isystem $(CUDA_HOME)/include
$(BUILD)/emulate/%.cu.o: %.cu
	@mkdir -p $(@D)
	@echo "  CXX   $<"
	$(Q)$(CXX) $(EMULATE_CXX) -x c++ -include tests/emulate/cuda.h -MMD -MP -MF $@.d -MT $@ -c $< -o $@.all
	$(Q)$(LD) -r --force-group-allocation $@.all -o $@.one
	$(Q)objcopy -w --keep-global-symbol='kld_cuda_*' $@.one $@ && rm $@.all $@.one
$(BUILD)/kernel-table-emulated: $(call OBJ,$(TABLE_C) $(filter tests/unit/kernels/%,$(UNIT_AUX_C)) $(wildcard tests/emulate/*.c) \
                                $(KERNELS_C) $(CUDA_C) $(PROTO_C)) $(EMULATE_CU)
	@echo "  LD    $@"
	$(Q)$(CXX) $(KLD_LDFLAGS) $(LDFLAGS) $^ -o $@ -lm
emulated: $(BUILD)/kernel-table-emulated
	@tests/run --table $< --backend cuda --only table --table-every $(EVERY)

# Fuzz targets: the code built once more by clang, without CUDA, with sanitizers and libFuzzer's counters; but for the
# kernels, which are gcc's (table and unit tests of them have its sanitizers). FUZZ_SAN: of `make fuzz-coverage`, another.
FUZZ_SAN   ?= -fsanitize=address,undefined -fno-sanitize-recover=undefined
FUZZ_FLAGS := -std=c17 -g -O1 -fno-omit-frame-pointer -fPIC -pthread -Wno-string-plus-int $(FUZZ_SAN)
FUZZ_CPP   := $(filter-out -D_FORTIFY_SOURCE=% -DKLD_WITH_CUDA,$(KLD_CPPFLAGS) $(CPPFLAGS))
FUZZ_OBJ    = $(patsubst %,$(BUILD)/fuzz/obj/%.o,$(1))
FUZZED_C   := $(PROTO_C) $(CLIENT_C) $(filter-out client/cli/main.c client/cli/bench%,$(CLI_C)) $(SERVER_C) \
              kernels/backends.c $(wildcard tests/fuzz/common/*.c) tests/unit/server/worker/fake_device.c
$(BUILD)/fuzz/obj/tests/%.c.o: COUNT :=
$(BUILD)/fuzz/obj/%.c.o: COUNT := -fsanitize=fuzzer-no-link
$(BUILD)/fuzz/obj/%.c.o: %.c
	@mkdir -p $(@D)
	@echo "  FUZZ  $<"
	$(Q)clang $(FUZZ_CPP) $(FUZZ_FLAGS) $(COUNT) -MMD -MP -c $< -o $@
$(BUILD)/fuzz/libfuzzed.a: $(call FUZZ_OBJ,$(FUZZED_C)) $(call OBJ,$(filter-out $(FUZZED_C),$(KERNELS_C)))
	$(Q)rm -f $@ && $(AR) rcs $@ $^
# Those whose server is on their own thread, with a clock of their own (turns.h).
FUZZ_TURNS := $(patsubst %,$(BUILD)/fuzz/%,answers replies)
$(FUZZ_TURNS): $(call FUZZ_OBJ,tests/fuzz/turns/turns.c)
$(FUZZ_TURNS): FUZZ_WRAP := $(patsubst %,-Xlinker --wrap=%,close epoll_wait getrandom nanosleep poll sched_yield send sendmsg \
                              timerfd_create timerfd_settime)
$(BUILD)/fuzz/replies: FUZZ_WRAP += -Xlinker --wrap=curl_easy_setopt
$(BUILD)/fuzz/%: $(BUILD)/fuzz/obj/tests/fuzz/%.c.o $(BUILD)/fuzz/libfuzzed.a
	@echo "  LD    $@"
	$(Q)clang $(FUZZ_FLAGS) -fsanitize=fuzzer $(FUZZ_WRAP) $^ -o $@ -Wl,--as-needed $(SERVER_LIBS) -lcurl -lm

# Loaded before libc it makes the N-th call of a kind fail; sanitizers have malloc() for themselves.
$(BUILD)/tests/fail/nth.so: $(FAIL_C) $(wildcard tests/fail/*.h)
	@mkdir -p $(@D)
	@echo "  LD    $@"
	$(Q)$(CC) $(filter-out -D_FORTIFY_SOURCE=%,$(KLD_CPPFLAGS) $(CPPFLAGS)) $(filter-out $(SAN_FLAGS),$(ALL_CFLAGS)) -shared $(FAIL_C) -o $@ -ldl -lgcc_s
# What it is loaded into, of libkld.
$(BUILD)/tests/fail/client: $(call OBJ,$(FAILING_C)) $(BUILD)/libkld.so
	@mkdir -p $(@D)
	@echo "  LD    $@"
	$(Q)$(CC) $(KLD_LDFLAGS) $(LDFLAGS) $(filter %.o,$^) -o $@ -L$(BUILD) -lkld -Wl,-rpath,'$$ORIGIN/../..' -ldl -lm
FAIL_SO := $(if $(SANITIZE),,$(BUILD)/tests/fail/nth.so $(BUILD)/tests/fail/client)

# Everything that a test may run.
programs: all unit examples bench-programs $(if $(TABLE_C),$(BUILD)/kernel-table) $(FAIL_SO)

.SECONDARY:
-include $(shell find $(BUILD)/obj $(BUILD)/fuzz/obj $(BUILD)/emulate $(CUDA_BUILD)/cuda -name '*.d' 2>/dev/null)

# ---- what people call -----------------------------------------------------------------------------
# Recipes that need packages install them first, so they build in a make of their own.
SELF  = +$(MAKE) --no-print-directory
SELF_ARGS = BUILD=$(BUILD) CUDA=$(CUDA) CUDA_BUILD=$(CUDA_BUILD) SANITIZE=$(SANITIZE)

help:
	@echo "make              build into $(BUILD)/ (CUDA=$(CUDA))"
	@echo "make demo         install what is missing, build, run the demonstration"
	@echo "make check        install what is missing, build, run every test that needs no GPU"
	@echo "make check-gpu    the kernel table and the end-to-end tests on the GPU, from the tarball's tree"
	@echo "make bench        measure this machine"
	@echo "make fuzz         fuzz every parser, SECONDS=$(SECONDS) each"
	@echo "make fuzz-coverage  what the corpus of each target reaches (FUZZ_CORPUS: another one)"
	@echo "make fuzz-found     what a run of fuzz-dist left in OUT goes to tests/fuzz/found.tar.xz"
	@echo "make fuzz-dist    $(BUILD)/kld-fuzz: the targets, to be run for long elsewhere"
	@echo "make fail-nth     the N-th call of each kind fails, for every N, in each role, while it starts, in libkld and in kld"
	@echo "make valgrind     the unit tests under valgrind"
	@echo "make coverage     lines and branches that unit and end-to-end tests reach, into $(COVERAGE)/"
	@echo "make lint         clang-format, clang-tidy, cppcheck, pyflakes, shellcheck"
	@echo "make metrics      the table of metrics in deploy/README.md, from the sources"
	@echo "make install      into DESTDIR=$(DESTDIR) PREFIX=$(PREFIX)"
	@echo "make dist         $(DIST).tar.gz, which runs on any x86-64 Linux with glibc 2.36 or newer"
	@echo "make image        a container (BUILDER=$(BUILDER), IMAGE=$(IMAGE), BASE, BUILD_BASE)"
	@echo "make wheel        the Python package, libkld in it, into $(BUILD)/"
	@echo "make clean        remove $(BUILD)/"

check:
	@deploy/deps.sh build check
	$(SELF) check-programs
	@tests/run --build $(BUILD) --jobs $(JOBS)
check-programs:
	$(SELF) programs $(SELF_ARGS) $(FOR_CHECK)

demo:
	@deploy/deps.sh build
	$(SELF) all examples $(SELF_ARGS) $(FOR_DEMO)
	@deploy/demo.sh $(BUILD)

bench: all bench-programs
	@$(BUILD)/bench/kernels
	@$(BUILD)/kld bench --server local:

SECONDS ?= 60
FUZZ_NAMES := $(patsubst tests/fuzz/%.c,%,$(FUZZ_C))
FUZZ_DIST ?= $(BUILD)/kld-fuzz
fuzz:
	@deploy/deps.sh build fuzz
	$(SELF) $(patsubst %,$(BUILD)/fuzz/%,$(FUZZ_NAMES)) $(SELF_ARGS)
	@deploy/fuzz.sh $(BUILD) $(SECONDS) $(FUZZ_NAMES)

fuzz-dist:
	@deploy/deps.sh build fuzz dist
	$(SELF) $(patsubst %,$(BUILD)/fuzz/%,$(FUZZ_NAMES)) $(SELF_ARGS)
	@deploy/fuzz-dist.sh $(BUILD) $(FUZZ_DIST) $(FUZZ_NAMES)

FUZZ_COVERAGE ?= build-fuzz-coverage
FUZZ_CORPUS   ?= tests/fuzz/corpus
fuzz-coverage:
	@deploy/deps.sh build fuzz
	$(SELF) $(patsubst %,$(FUZZ_COVERAGE)/fuzz/%,$(FUZZ_NAMES)) BUILD=$(FUZZ_COVERAGE) CUDA=0 \
	  FUZZ_SAN="-fprofile-instr-generate -fcoverage-mapping"
	@deploy/fuzz-coverage.sh $(FUZZ_COVERAGE) $(FUZZ_CORPUS) $(FUZZ_NAMES)

# OUT: what run.sh of fuzz-dist has left there.
fuzz-found:
	@test -n "$(OUT)" || { echo "fuzz-found: OUT=FOLDER is missing, that of run.sh of fuzz-dist" >&2; exit 2; }
	@deploy/deps.sh build fuzz
	$(SELF) $(patsubst %,$(BUILD)/fuzz/%,$(FUZZ_NAMES)) $(SELF_ARGS)
	@deploy/fuzz-found.sh $(BUILD) "$(OUT)" $(FUZZ_NAMES)

metrics: $(BUILD)/kld-server
	@deploy/metrics.sh $(BUILD)

fail-nth: $(BUILD)/kld-server $(BUILD)/kld $(FAIL_SO)
	@FAIL_NTH_EVERY=1 tests/run --build $(BUILD) --only e2e -k test_fail_

valgrind:
	@deploy/deps.sh build check valgrind
	$(SELF) unit $(SELF_ARGS)
	@tests/run --build $(BUILD) --only unit --valgrind

# Its gateways run without their sandbox, in which nobody writes files, counters included.
COVERAGE ?= build-coverage
coverage:
	@deploy/deps.sh build check coverage
	$(SELF) programs BUILD=$(COVERAGE) CUDA=0 SANITIZE=coverage
	@find $(COVERAGE) -name '*.gcda' -delete
	@TEST_SANDBOX=false tests/run --build $(COVERAGE) --only unit,table,e2e --table-every 5 $(COVERAGE_ARGS); status=$$?; \
	  deploy/coverage.sh $(COVERAGE) && exit $$status

lint:
	@deploy/deps.sh build check lint
	@deploy/lint.sh

clean:
	rm -rf $(BUILD)

# ---- install ----------------------------------------------------------------------------------------
# Pages of man(1) are not compressed: who makes a package of it does that.
SO_MAJOR := 0
TO        = $(DESTDIR)$(PREFIX)
MANDIR   ?= $(PREFIX)/share/man
MAN_PAGES := $(wildcard client/*.[1-9] server/*.[1-9])
install: all
	$(Q)install -d $(TO)/bin $(TO)/lib/pkgconfig $(TO)/include/kld $(TO)/share/bash-completion/completions
	$(Q)install -m 755 $(BUILD)/kld-server $(BUILD)/kld $(TO)/bin/
	$(Q)install -m 644 $(BUILD)/libkld.a $(TO)/lib/
	$(Q)install -m 755 $(BUILD)/libkld.so $(TO)/lib/libkld.so.$(VERSION)
	$(Q)ln -sf libkld.so.$(VERSION) $(TO)/lib/libkld.so.$(SO_MAJOR)
	$(Q)ln -sf libkld.so.$(SO_MAJOR) $(TO)/lib/libkld.so
	$(Q)for header in client/kld.h proto/op.h proto/status.h; do to=$(TO)/include/kld/$${header##*/}; \
	  sed 's|#include "proto/|#include "|' $$header > $$to && chmod 644 $$to || exit 1; done
	$(Q)sed -e 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|; s|@LIBS@|$(LIB_LIBS)|' deploy/kld.pc.in \
	  > $(TO)/lib/pkgconfig/kld.pc && chmod 644 $(TO)/lib/pkgconfig/kld.pc
	$(Q)install -m 644 client/cli/kld.bash $(TO)/share/bash-completion/completions/kld
	$(Q)for page in $(MAN_PAGES); do install -D -m 644 -t $(DESTDIR)$(MANDIR)/man$${page##*.} $$page || exit 1; done
	$(Q)[ -n "$(DESTDIR)" ] || [ "$$(id -u)" != 0 ] || { PATH=$$PATH:/usr/sbin:/sbin; \
	  ! ldconfig -NXv 2>/dev/null | grep -q '^$(PREFIX)/lib:' || ldconfig || true; } # where it is a folder of the loader's
	@echo "installed into $(TO)"

# ---- the tarball ------------------------------------------------------------------------------------
DIST = $(BUILD)/kld-$(VERSION)-linux-x86_64
dist: all examples bench-programs $(if $(TABLE_C),$(BUILD)/kernel-table)
	@deploy/dist.sh $(BUILD) $(DIST) CUDA=$(CUDA) CUDA_BUILD=$(CUDA_BUILD) SANITIZE=$(SANITIZE)

# BASE, BUILD_BASE: see the Dockerfile. BUILDER: any program that takes `build` as docker does. buildah and podman write
# OCI's format unless told otherwise, which has no HEALTHCHECK; docker does not know --format.
BUILDER    ?= docker
IMAGE      ?= kld:$(VERSION)
BASE       ?=
BUILD_BASE ?=
IMAGE_ARGS ?=
image:
	$(BUILDER) build $(if $(filter buildah podman,$(notdir $(firstword $(BUILDER)))),--format docker) \
	  $(IMAGE_ARGS) $(if $(BASE),--build-arg BASE=$(BASE)) \
	  $(if $(BUILD_BASE),--build-arg BUILD_BASE=$(BUILD_BASE)) \
	  --build-arg VERSION=$(VERSION) --build-arg REVISION=$(COMMIT) -t $(IMAGE) .

print-cuda:
	@echo $(CUDA)
print-nvcc:
	@echo '$(NVCC)'

wheel: lib
	@deploy/wheel.sh $(BUILD)

check-gpu: dist
	@tree=$$(mktemp -d) && tar -xzf $(DIST).tar.gz -C $$tree && \
	  { $$tree/$(notdir $(DIST))/check-gpu; status=$$?; rm -rf $$tree; exit $$status; }
