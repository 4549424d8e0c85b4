/* A self-test of native.c for a processor that is not that of this machine: `make test-aarch64`.
 *
 * Includes the source, so that it is one program without any library but libc. Checksums are compared with those of
 * xxhash, which the script writes into checksums.h; copies with memcmp; a file that shrinks with SIGBUS.
 */
#include "../../src/penstock/source/native.c"
#include <stdio.h>
#include <unistd.h>

static const struct {
    int64_t length;
    uint64_t sum;
} KNOWN[] = {
#include "checksums.h"
};

static int failures;

static void check(int right, const char *what, int64_t number)
{
    if (!right) {
        printf("wrong: %s %lld\n", what, (long long)number);
        failures++;
    }
}

/* The same bytes as in scripts/aarch64.py. */
static void fill(uint8_t *bytes, int64_t count)
{
    uint32_t state = 1;
    for (int64_t n = 0; n < count; n++) {
        state = state * 1664525 + 1013904223;
        bytes[n] = (uint8_t)(state >> 24);
    }
}

int main(void)
{
    enum { N_BYTES = 1 << 16 };
    static uint8_t bytes[N_BYTES], out[N_BYTES];
    char path[] = "/tmp/penstock-XXXXXX";
    fill(bytes, N_BYTES);
    const int file = mkstemp(path);
    if (file < 0 || write(file, bytes, N_BYTES) != N_BYTES)
        return 2;
    void *map = mmap(NULL, N_BYTES, PROT_READ, MAP_SHARED, file, 0);
    struct stat status;
    if (map == MAP_FAILED || fstat(file, &status))
        return 2;
    const struct shard shard = {file, map, N_BYTES,
                                (int64_t)status.st_ctim.tv_sec * 1000000000 + status.st_ctim.tv_nsec};
    const int64_t zero = 0;
    const uint8_t verify = 1;
    int64_t wrong;
    for (size_t n = 0; n < sizeof KNOWN / sizeof *KNOWN; n++) {
        const int64_t length = KNOWN[n].length;
        const struct member member = {0, 0, length, length};
        const struct target target = {out, N_BYTES};
        uint64_t sum = KNOWN[n].sum;
        memset(out, 0, sizeof out);
        int64_t copied =
            penstock_copy(1, 1, &shard, &zero, &zero, 1, &member, 0, &target, &zero, &verify, &sum, UINT64_MAX, &wrong);
        check(copied == 1 && wrong == UNREADABLE, "checksum of bytes:", length);
        check(!memcmp(out, bytes, (size_t)length), "copy of bytes:", length);
        sum ^= 1;
        copied =
            penstock_copy(1, 1, &shard, &zero, &zero, 1, &member, 0, &target, &zero, &verify, &sum, UINT64_MAX, &wrong);
        check(copied == 0 && wrong == 0, "another checksum is found, of bytes:", length);
    }
    /* Gather: 64 items of 100 bytes after a header of 24, in reverse. */
    int64_t which[64] = {0}, begins[64], places[64];
    for (int64_t n = 0; n < 64; n++) {
        begins[n] = 1000 * (63 - n);
        places[n] = (n * 7) % 64;
    }
    const struct member gathered = {0, 24, 100, 130};
    const struct target rows = {out, 6400};
    check(penstock_copy(64, 1, &shard, which, begins, 1, &gathered, 0, &rows, places, NULL, NULL, 0, &wrong) == 64,
          "items gathered", 64);
    for (int64_t n = 0; n < 64; n++)
        check(!memcmp(out + 100 * places[n], bytes + begins[n] + 24, 100), "gathered item", n);
    uint8_t changed;
    penstock_changed(1, &shard, &changed);
    check(!changed, "an unchanged file", 0);
    begins[3] = N_BYTES - 100; /* does not fit */
    check(penstock_copy(64, 1, &shard, which, begins, 1, &gathered, 0, &rows, places, NULL, NULL, 0, &wrong) == 3 &&
              wrong == INVALID, "an item outside", 3);
    begins[3] = 60000;
    if (ftruncate(file, 0))
        return 2;
    check(penstock_copy(64, 1, &shard, which, begins, 1, &gathered, 0, &rows, places, NULL, NULL, 0, &wrong) == 0 &&
              wrong == UNREADABLE, "a file that shrank", 0);
    penstock_changed(1, &shard, &changed);
    check(changed, "a changed file", 0);
    unlink(path);
    printf("%s: %zu checksums, %d failures\n", penstock_checksum_version(), sizeof KNOWN / sizeof *KNOWN, failures);
    return failures != 0;
}
