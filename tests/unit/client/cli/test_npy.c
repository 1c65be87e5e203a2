/* test_npy.c - headers of .npy files: those that NumPy writes, and everything that must not pass.
 */
#include "tests/unit/unit.h"

#include <stdio.h>
#include <string.h>

#include "client/cli/npy.h"

static char file[4096];
static struct kld_array array;
static struct kld_error error;

/* A file with this dict and `values` bytes behind it; its size. */
static size_t make(unsigned version, const char *dict, size_t values) {
    size_t length = strlen(dict), at = version == 1 ? 10 : 12;
    memset(file, 0, sizeof file);
    memcpy(file, "\x93NUMPY", 6);
    file[6] = (char)version;
    file[8] = (char)(length & 0xff);
    file[9] = (char)(length >> 8);
    memcpy(file + at, dict, length);
    return at + length + values;
}

static enum kld_status parse(unsigned version, const char *dict, size_t values) {
    return kld_npy_parse(file, make(version, dict, values), &array, &error);
}

START_TEST(test_good) {
    const char *dict = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 5), }      \n";
    for (unsigned version = 1; version <= 3; version++) {
        ck_assert_int_eq(parse(version, dict, 60), KLD_OK);
        ck_assert_int_eq(array.dtype, KLD_DTYPE_FP32);
        ck_assert_uint_eq(array.rank, 2);
        ck_assert_uint_eq(array.shape[0], 3);
        ck_assert_uint_eq(array.shape[1], 5);
        ck_assert_uint_eq(array.bytes, 60);
        ck_assert_uint_eq(array.offset_bytes, (version == 1 ? 10 : 12) + strlen(dict));
    }
    ck_assert_int_eq(parse(1, "{'shape':(7,),'descr':\"<f8\",'fortran_order':True}", 56), KLD_OK);
    ck_assert_int_eq(array.dtype, KLD_DTYPE_FP64);
    ck_assert_int_eq(parse(1, "{'shape':(7L,),'descr':'|b1','fortran_order':False}", 7), KLD_OK);
    ck_assert_int_eq(parse(1, "{'shape':(7,),'descr':'|u1','fortran_order':False}", 7), KLD_OK);
    ck_assert_int_eq(parse(1, "{'shape':(),'descr':'<f2','fortran_order':False}", 2), KLD_OK);
    ck_assert_uint_eq(array.rank, 0);
}
END_TEST

static const struct {
    const char *dict;
    size_t values;
    const char *text; /* in the error */
} bad[] = {
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 5), }", 59, "cut short"},
    {"{'descr': '>f4', 'fortran_order': False, 'shape': (3, 5), }", 60, "big-endian"},
    {"{'descr': '<f4', 'fortran_order': True, 'shape': (3, 5), }", 60, "Fortran"},
    {"{'descr': '|O', 'fortran_order': False, 'shape': (3, 5), }", 60, "objects"},
    {"{'descr': '<i8', 'fortran_order': False, 'shape': (3, 5), }", 120, "'<i8'"},
    {"{'descr': '', 'fortran_order': False, 'shape': (3, 5), }", 120, "not supported"},
    {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3,), }", 60, "structured"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 0), }", 60, "empty"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", 60, "2^40"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }", 60, "cut short"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }", 60, "tuple"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (-3,), }", 60, "tuple"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (3 5), }", 60, "tuple"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1), }", 60, "dimensions"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': 3, }", 60, "tuple"},
    {"{'descr': '<f4', 'fortran_order': 0, 'shape': (3,), }", 60, "fortran_order"},
    {"{'descr': '<f4', 'shape': (3,), }", 60, "lacks"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'more': 1}", 60, "unknown key"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (3,) ", 60, "malformed"},
    {"{'descr' '<f4'}", 60, "malformed"},
    {"['descr']", 60, "not a dict"},
    {"", 60, "not a dict"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (3,)} {}", 60, "follows"},
};

START_TEST(test_bad) {
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        enum kld_status status = parse(1, bad[i].dict, bad[i].values);
        ck_assert_msg(status != KLD_OK, "case %zu passed", i);
        ck_assert_msg(strstr(error.text, bad[i].text) != NULL, "case %zu: %s", i, error.text);
    }
}
END_TEST

START_TEST(test_cut_anywhere) {
    size_t whole = make(2, "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 5), }", 60);
    for (size_t bytes = 0; bytes < whole; bytes++) {
        char *exact = malloc(bytes ? bytes : 1); /* a read beyond it is seen by the sanitizer */
        memcpy(exact, file, bytes);
        ck_assert_int_ne(kld_npy_parse(exact, bytes, &array, &error), KLD_OK);
        free(exact);
    }
    file[6] = 4;
    ck_assert_int_eq(kld_npy_parse(file, whole, &array, &error), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "version 4"));
    file[6] = 2;
    memset(file + 8, 0xff, 4); /* a header of 4 GiB */
    ck_assert_int_eq(kld_npy_parse(file, whole, &array, &error), KLD_INVALID);
}
END_TEST

START_TEST(test_written_is_read) {
    const uint64_t shapes[3][KLD_RANK_MAX] = {{5}, {7, 3}, {137438953472, 1, 1, 1, 1, 1, 1, 8}};
    const uint32_t ranks[3] = {1, 2, 8};
    for (int i = 0; i < 3; i++) {
        struct kld_array out = {.dtype = KLD_DTYPE_FP16, .rank = ranks[i]};
        memcpy(out.shape, shapes[i], sizeof out.shape);
        ck_assert_int_eq(kld_array_size(&out, &error), KLD_OK);
        char header[KLD_NPY_HEADER_BYTES];
        size_t bytes = kld_npy_header(&out, header);
        ck_assert_uint_eq(bytes % 64, 0);
        ck_assert_int_eq(kld_npy_parse(header, bytes + out.bytes, &array, &error), KLD_OK);
        ck_assert_uint_eq(array.offset_bytes, bytes);
        ck_assert_uint_eq(array.rank, out.rank);
        ck_assert_mem_eq(array.shape, out.shape, sizeof out.shape);
        ck_assert_int_eq(array.dtype, KLD_DTYPE_FP16);
    }
    struct kld_array none = {.dtype = KLD_DTYPE_BF16, .rank = 1, .shape = {1}};
    char header[KLD_NPY_HEADER_BYTES];
    ck_assert_uint_eq(kld_npy_header(&none, header), 0);
}
END_TEST

UNIT_MAIN("client/cli/npy", test_good, test_bad, test_cut_anywhere, test_written_is_read)
