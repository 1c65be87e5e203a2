# kld: build, test, install. `make help` lists the targets; README.md explains them.
#
# Variables: BUILD (output folder), SANITIZE (empty, address or thread), CUDA (1, 0; default: 1 if nvcc is
# there), PREFIX, DESTDIR, V=1 for the full command lines.

BUILD    ?= build
SANITIZE ?=
PREFIX   ?= /usr/local
NVCC     ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
CUDA     ?= $(if $(NVCC),1,0)
VERSION  := $(shell cat proto/VERSION)
COMMIT   := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
Q        := $(if $(V),,@)

CC       ?= gcc
WARN     := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith \
            -Wvla -Wwrite-strings -Wno-unused-parameter
HARDEN   := -fstack-protector-strong -fno-plt
CPPFLAGS += -I. -D_GNU_SOURCE -DKLD_RELEASE='"$(VERSION)"' $(if $(filter 1,$(CUDA)),-DKLD_WITH_CUDA)
CFLAGS   ?= -O2 -g
ALL_CFLAGS = -std=c17 $(CFLAGS) $(WARN) $(HARDEN) -fPIC -fvisibility=hidden -pthread $(SAN_FLAGS)
LDFLAGS  += -pthread -Wl,-z,relro,-z,now -pie $(SAN_FLAGS)

ifeq ($(SANITIZE),address)
SAN_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
else ifeq ($(SANITIZE),thread)
SAN_FLAGS := -fsanitize=thread -fno-omit-frame-pointer
else
CPPFLAGS  += -D_FORTIFY_SOURCE=2
endif

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
UNIT_AUX_C := $(shell find tests/unit -name '*.c' ! -name 'test_*.c' 2>/dev/null | sort)
BENCH_C    := $(wildcard tests/bench/*.c)

OBJ         = $(patsubst %,$(BUILD)/obj/%.o,$(1))
# CUDA objects are the same under every sanitizer: they are built once, in CUDA_BUILD.
CUDA_BUILD ?= build
CUDA_OBJ   := $(patsubst %,$(CUDA_BUILD)/cuda/%.o,$(CUDA_CU))
LIB_OBJ    := $(call OBJ,$(PROTO_C) $(KERNELS_C) $(CUDA_C) $(CLIENT_C))
SERVER_OBJ := $(call OBJ,$(SERVER_C))

CUDA_HOME  := $(patsubst %/bin/nvcc,%,$(NVCC))
CUDA_LIBS  := $(if $(filter 1,$(CUDA)),-L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt -lstdc++)
LIB_LIBS   := $(CUDA_LIBS) -lcurl -lm
SERVER_LIBS := -lmicrohttpd -lcjson -luv -lz
CHECK_LIBS := -lcheck -lsubunit -lrt

CUDA_ARCHS ?= 80 86 89 90 100
NVCC_FLAGS := -O3 -std=c++17 -I. -Xcompiler -fPIC,-fvisibility=hidden,-Wall -DKLD_WITH_CUDA --expt-relaxed-constexpr \
  $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
  -gencode arch=compute_$(firstword $(CUDA_ARCHS)),code=compute_$(firstword $(CUDA_ARCHS)) \
  -gencode arch=compute_$(lastword $(CUDA_ARCHS)),code=compute_$(lastword $(CUDA_ARCHS))

.PHONY: all lib unit examples
all: $(BUILD)/kld-server $(BUILD)/kld $(BUILD)/libkld.so $(BUILD)/libkld.a
lib: $(BUILD)/libkld.a $(BUILD)/libkld.so

# The two vector widths of the CPU back end: the same source, chosen at run time.
$(BUILD)/obj/kernels/cpu/%_avx2.c.o: EXTRA := -mavx2 -mfma -mf16c -O3 -ffp-contract=fast
$(BUILD)/obj/kernels/cpu/%_avx512.c.o: EXTRA := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -O3 -ffp-contract=fast \
  -mprefer-vector-width=512
$(BUILD)/obj/kernels/cuda/%.c.o: EXTRA := -isystem $(CUDA_HOME)/include

$(BUILD)/obj/%.c.o: %.c
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) $(CPPFLAGS) $(ALL_CFLAGS) $(EXTRA) -MMD -MP -c $< -o $@

$(CUDA_BUILD)/cuda/%.cu.o: %.cu
	@mkdir -p $(@D)
	@echo "  NVCC  $<"
	$(Q)$(NVCC) $(NVCC_FLAGS) -MMD -MP -MF $@.d -c $< -o $@

$(BUILD)/libkld.a: $(LIB_OBJ) $(CUDA_OBJ)
	@echo "  AR    $@"
	$(Q)rm -f $@ && ar rcs $@ $^

$(BUILD)/libkld.so: $(LIB_OBJ) $(CUDA_OBJ)
	@echo "  LD    $@"
	$(Q)$(CC) -shared -Wl,-soname,libkld.so.0 $(filter-out -pie,$(LDFLAGS)) $^ -o $@ $(LIB_LIBS)
	$(Q)ln -sf libkld.so $(BUILD)/libkld.so.0

$(BUILD)/kld-server: $(call OBJ,server/main.c) $(SERVER_OBJ) $(BUILD)/libkld.a
	@echo "  LD    $@"
	$(Q)$(CC) $(LDFLAGS) $^ -o $@ $(SERVER_LIBS) $(LIB_LIBS)

$(BUILD)/kld: $(call OBJ,$(CLI_C)) $(BUILD)/libkld.a
	@echo "  LD    $@"
	$(Q)$(CC) $(LDFLAGS) $^ -o $@ $(LIB_LIBS) -lcjson

# Examples see only the public headers and libkld.so.
$(BUILD)/examples/%: client/examples/%.c $(BUILD)/libkld.so
	@mkdir -p $(@D)
	@echo "  LD    $@"
	$(Q)$(CC) -std=c17 -I. -D_GNU_SOURCE $(CFLAGS) $(WARN) $(SAN_FLAGS) -pthread $< -o $@ -L$(BUILD) -lkld -lm -Wl,-rpath,'$$ORIGIN/..'
examples: $(patsubst client/examples/%.c,$(BUILD)/examples/%,$(EXAMPLES_C))

# A unit test is one program with its own main (tests/unit/unit.h); it may call anything inside.
$(BUILD)/tests/unit/%: $(BUILD)/obj/tests/unit/%.c.o $(call OBJ,$(UNIT_AUX_C)) $(SERVER_OBJ) $(BUILD)/libkld.a
	@mkdir -p $(@D)
	@echo "  LD    $@"
	$(Q)$(CC) $(LDFLAGS) $^ -o $@ $(SERVER_LIBS) $(LIB_LIBS) $(CHECK_LIBS)
UNIT_BIN := $(patsubst %.c,$(BUILD)/%,$(UNIT_C))
unit: $(UNIT_BIN)

$(BUILD)/bench/%: $(BUILD)/obj/tests/bench/%.c.o $(BUILD)/libkld.a
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS) $^ -o $@ $(LIB_LIBS)
bench-programs: $(patsubst tests/bench/%.c,$(BUILD)/bench/%,$(BENCH_C))

.SECONDARY:
-include $(shell find $(BUILD)/obj $(CUDA_BUILD)/cuda -name '*.d' 2>/dev/null)
