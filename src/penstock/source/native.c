/* Copies items from memory-mapped files into arrays, and computes their checksums in the same pass.
 *
 * Reading from the map of a truncated file raises SIGBUS, which normally ends the process. Here it ends only the copy:
 * the items before it are valid. A SIGBUS from anywhere else is passed to the handler that was installed before.
 *
 * Where members lie comes from files, so nothing is read or written before it is checked here, whatever Python checked:
 * every byte lies within its map and within its target.
 *
 * Called through ctypes, which releases the GIL; nothing here depends on Python.
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The checksums are implemented for little-endian processors only."
#endif

#ifndef POSIX_FADV_WILLNEED /* macOS has no such hints */
enum { POSIX_FADV_WILLNEED, POSIX_FADV_DONTNEED };
static int posix_fadvise(int file, int64_t begin, int64_t n_bytes, int advice)
{
    (void)file, (void)begin, (void)n_bytes, (void)advice;
    return 0;
}
#endif
#if defined(__APPLE__)
#define st_ctim st_ctimespec
#define INITIAL_EXEC /* memory of a thread is always allocated when it is first used */
#else
#define INITIAL_EXEC __attribute__((tls_model("initial-exec")))
#endif

#define READAHEAD_BYTES (1 << 15) /* from this size on, checking the page cache costs little compared with copying */
#define LEAST_PIECE (1 << 17)     /* that every kernel reads ahead after one call */
#define ASSUMED_PIECES 15         /* assumed to be missing after one that is */
#define PRESENT_PIECES 12         /* that were there one after the other: the next ones are most likely there, too */

#ifndef SOURCE_DIGEST
#define SOURCE_DIGEST 0
#endif
const uint64_t penstock_source_digest = SOURCE_DIGEST; /* of the source that this was compiled from */

/* A whole file mapped into memory, and its ctime when it was mapped. */
struct shard {
    int64_t file; /* descriptor; -1: unknown */
    const uint8_t *map;
    int64_t n_bytes;
    int64_t changed_ns;
};

/* One tar member: byte offsets from the beginning of its extent. Same columns as `members` in tar/layout.py. */
struct member {
    int64_t begin; /* of the header */
    int64_t data;
    int64_t n_bytes; /* of the data */
    int64_t end;     /* of the padding */
};

/* The array that the data of one member of all items are copied into. */
struct target {
    uint8_t *first;
    int64_t n_bytes;
};

/* -- catch SIGBUS during a copy ------------------------------------------------------------------------------------ */

struct guarded_read {
    sigjmp_buf escape;
    uintptr_t low, high; /* addresses that are being read */
};

/* "initial-exec": allocated when the thread starts, because a signal handler must not be the first to allocate it. */
static _Thread_local struct guarded_read *volatile current_read INITIAL_EXEC;
static struct sigaction previous_action;

static void on_sigbus(int number, siginfo_t *info, void *context)
{
    (void)context;
    struct guarded_read *mine = current_read;
    uintptr_t at = (uintptr_t)info->si_addr;
    if (info->si_code > 0 && mine && mine->low <= at && at < mine->high)
        siglongjmp(mine->escape, 1);
    /* Not ours. With the previous handler restored, the same instruction faults again and reaches it. If that handler
     * in turn restores this one, the next fault gets the default action, so that they cannot loop. */
    struct sigaction next = previous_action;
    previous_action = (struct sigaction){.sa_handler = SIG_DFL};
    sigaction(SIGBUS, &next, NULL);
    if (info->si_code <= 0) /* sent by kill(): no instruction would fault again */
        raise(number);
}

/* Called before every copy: faulthandler or a torch worker may have installed another handler since the last one. */
static int install_handler(void)
{
    struct sigaction now;
    if (sigaction(SIGBUS, NULL, &now))
        return 0;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_sigbus)
        return 1;
    previous_action = now;
    struct sigaction ours = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    return !sigaction(SIGBUS, &ours, NULL);
}

/* -- non-temporal copies ------------------------------------------------------------------------------------------ */

/* Non-temporal stores bypass the caches, and spare reading the lines that they overwrite. For batches from this size on
 * they may be faster, but not on every machine: the first such copies try both kinds in turn. */
#ifndef STREAMED_BATCH /* tests set other numbers */
#define STREAMED_BATCH (6 << 20)
#define STREAMED_MEMBER (1 << 14)
#define STORE_TRIALS 16
#endif

enum { LINE = 64, AHEAD_BYTES = 2048 };

static void stream(uint8_t *to, const uint8_t *from, int64_t n_bytes)
{
    int64_t at = 0;
#if defined(__x86_64__)
    int64_t head = (int64_t)(-(uintptr_t)to & (LINE - 1));
    if (head > n_bytes)
        head = n_bytes;
    memcpy(to, from, (size_t)head);
    for (at = head; at + LINE <= n_bytes; at += LINE) {
        const __m128i *line = (const __m128i *)(from + at);
        _mm_prefetch((const char *)line + AHEAD_BYTES, _MM_HINT_T0); /* the hardware prefetcher stops at page borders */
        __m128i words[4] = {
            _mm_loadu_si128(line), _mm_loadu_si128(line + 1), _mm_loadu_si128(line + 2), _mm_loadu_si128(line + 3)};
        for (int word = 0; word < 4; word++)
            _mm_stream_si128((__m128i *)(to + at) + word, words[word]);
    }
#endif
    memcpy(to + at, from + at, (size_t)(n_bytes - at));
}

/* Make streamed stores visible to other threads before any store that follows. */
static void fence_streams(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* What large copies have taken so far with ordinary stores, and with non-temporal ones. */
struct trial {
    atomic_uint count;
    _Atomic uint64_t least[2]; /* ns of the processor for 1 MiB */
};

static struct trial trials[2] = {{0, {UINT64_MAX, UINT64_MAX}}, {0, {UINT64_MAX, UINT64_MAX}}}; /* [1]: with checksums */

/* A copy that is being made. */
struct timed_copy {
    struct trial *trial; /* NULL: nothing is tried */
    uint64_t began_ns;
    int streamed;
};

static uint64_t processor_ns(void) /* not by the clock: other programs and the disk say nothing about stores */
{
    struct timespec now;
    return clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) ? 0 : (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Choose the kind of stores for a copy. A consumer finds in the caches what ordinary stores leave there, so non-temporal
 * ones must take less than 9/10 of their time. */
static struct timed_copy begin_copy(int is_large, int verify)
{
    struct trial *trial = trials + (verify != 0);
    if (!is_large)
        return (struct timed_copy){NULL, 0, 0};
    if (atomic_load(&trial->count) >= STORE_TRIALS) {
        const uint64_t ordinary = atomic_load(&trial->least[0]);
        return (struct timed_copy){NULL, 0, atomic_load(&trial->least[1]) < ordinary - ordinary / 10};
    }
    return (struct timed_copy){trial, processor_ns(), atomic_fetch_add(&trial->count, 1) % 2 == 0};
}

static void end_copy(const struct timed_copy *copy, int64_t n_bytes)
{
    if (!copy->trial || n_bytes < 1 << 20)
        return;
    const uint64_t took = (processor_ns() - copy->began_ns) / (uint64_t)(n_bytes >> 20);
    if (took < atomic_load(&copy->trial->least[copy->streamed]))
        atomic_store(&copy->trial->least[copy->streamed], took);
}

/* -- XXH3, 64 bits, without a seed --------------------------------------------------------------------------------- */

enum { STRIPE = 64, BLOCK_STRIPES = 16, KEY_BYTES = 192, LAST_KEY = KEY_BYTES - STRIPE - 7, MERGE_KEY = 11 };
enum { SHORT_BYTES = 240 }; /* longer inputs are summed in stripes */

static const uint64_t PRIME32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
static const uint64_t PRIME64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                                   0x27D4EB2F165667C5};

static const uint8_t KEY[KEY_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t load_u64(const uint8_t *at)
{
    uint64_t found;
    memcpy(&found, at, sizeof found);
    return found;
}

/* The accumulators, and the number of stripes added so far. */
struct xxh3 {
    uint64_t lanes[8];
    int64_t stripes;
};

enum store { NOWHERE, CACHED, STREAMED };

/* Add consecutive stripes to the checksum, and store them. Each stripe is loaded once, so that the bytes stored are the
 * bytes summed, even if another process writes to the file meanwhile. STREAMED needs `to` aligned to a cache line. */
typedef void add_stripes(struct xxh3 *xxh3, const uint8_t *from, int64_t count, uint8_t *to, enum store store);

/* The __asm__ keeps the compiler from loading the bytes from the file a second time, here and below. */
static inline void load_stripe(uint8_t stripe[STRIPE], const uint8_t *from)
{
    memcpy(stripe, from, STRIPE);
    __asm__("" : "+m"(*(uint8_t(*)[STRIPE])stripe));
}

static inline void add_stripe(uint64_t lanes[8], const uint8_t *stripe, const uint8_t *key)
{
    for (int lane = 0; lane < 8; lane++) {
        uint64_t value = load_u64(stripe + 8 * lane), mixed = value ^ load_u64(key + 8 * lane);
        lanes[lane ^ 1] += value;
        lanes[lane] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
    }
}

static void add_scalar(struct xxh3 *xxh3, const uint8_t *from, int64_t count, uint8_t *to, enum store store)
{
    for (int64_t n = 0; n < count; n++) {
        uint8_t stripe[STRIPE];
        load_stripe(stripe, from + STRIPE * n);
        if (store != NOWHERE)
            memcpy(to + STRIPE * n, stripe, STRIPE);
        add_stripe(xxh3->lanes, stripe, KEY + 8 * (xxh3->stripes % BLOCK_STRIPES));
        if (++xxh3->stripes % BLOCK_STRIPES == 0)
            for (int lane = 0; lane < 8; lane++) {
                xxh3->lanes[lane] ^= xxh3->lanes[lane] >> 47;
                xxh3->lanes[lane] ^= load_u64(KEY + KEY_BYTES - STRIPE + 8 * lane);
                xxh3->lanes[lane] *= PRIME32[0];
            }
    }
}

#if defined(__x86_64__)
#define FOR_AVX2 __attribute__((target("avx2")))

FOR_AVX2 static inline __m256i half_at(const void *at) { return _mm256_loadu_si256(at); }

FOR_AVX2 __attribute__((always_inline))
static inline void loop_avx2(struct xxh3 *xxh3, const uint8_t *from, int64_t count, uint8_t *to, enum store store)
{
    __m256i sum[2] = {half_at(xxh3->lanes), half_at(xxh3->lanes + 4)}, prime = _mm256_set1_epi64x((int64_t)PRIME32[0]);
    int64_t in_block = xxh3->stripes % BLOCK_STRIPES;
    xxh3->stripes += count;
    for (int64_t n = 0; n < count; n++) {
        if (n < count - AHEAD_BYTES / STRIPE)
            _mm_prefetch((const char *)from + STRIPE * n + AHEAD_BYTES, _MM_HINT_T0);
        for (int half = 0; half < 2; half++) {
            const int64_t at = STRIPE * n + 32 * half;
            __m256i value = half_at(from + at);
            __asm__("" : "+x"(value));
            if (store == CACHED)
                _mm256_storeu_si256((__m256i *)(to + at), value);
            else if (store == STREAMED)
                _mm256_stream_si256((__m256i *)(to + at), value);
            __m256i mixed = _mm256_xor_si256(value, half_at(KEY + 8 * in_block + 32 * half));
            __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
            __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
            sum[half] = _mm256_add_epi64(sum[half], _mm256_add_epi64(product, swapped));
        }
        if (++in_block < BLOCK_STRIPES)
            continue;
        in_block = 0;
        for (int half = 0; half < 2; half++) {
            __m256i mixed = _mm256_xor_si256(sum[half], _mm256_srli_epi64(sum[half], 47));
            mixed = _mm256_xor_si256(mixed, half_at(KEY + KEY_BYTES - STRIPE + 32 * half));
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            sum[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
    }
    _mm256_storeu_si256((__m256i *)xxh3->lanes, sum[0]);
    _mm256_storeu_si256((__m256i *)(xxh3->lanes + 4), sum[1]);
}

/* One loop for each kind of store. */
FOR_AVX2
static void add_avx2(struct xxh3 *xxh3, const uint8_t *from, int64_t count, uint8_t *to, enum store store)
{
    if (store == STREAMED)
        loop_avx2(xxh3, from, count, to, STREAMED);
    else if (store == CACHED)
        loop_avx2(xxh3, from, count, to, CACHED);
    else
        loop_avx2(xxh3, from, count, to, NOWHERE);
}
#endif

#ifndef WIDEST_BITS /* tests set it, to try all widths on one machine */
#define WIDEST_BITS 256
#endif

static add_stripes *choose_add_stripes(void)
{
#if defined(__x86_64__)
    if (WIDEST_BITS >= 256 && __builtin_cpu_supports("avx2"))
        return add_avx2;
#endif
    return add_scalar;
}

/* Return the name of the version that this CPU runs. */
const char *penstock_checksum_version(void)
{
    return choose_add_stripes() == add_scalar ? "portable" : "avx2";
}

static inline uint64_t fold(uint64_t left, uint64_t right)
{
    __uint128_t product = (__uint128_t)left * right;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t found)
{
    found ^= found >> 37;
    found *= 0x165667919E3779F9;
    return found ^ found >> 32;
}

static uint64_t merge_lanes(const uint64_t lanes[8], uint64_t length)
{
    uint64_t found = length * PRIME64[0];
    for (int lane = 0; lane < 8; lane += 2) {
        const uint8_t *key = KEY + MERGE_KEY + 8 * lane;
        found += fold(lanes[lane] ^ load_u64(key), lanes[lane + 1] ^ load_u64(key + 8));
    }
    return avalanche(found);
}

static inline uint64_t load_u32(const uint8_t *at)
{
    uint32_t found;
    memcpy(&found, at, sizeof found);
    return found;
}

static inline uint64_t mix_16(const uint8_t *at, const uint8_t *key)
{
    return fold(load_u64(at) ^ load_u64(key), load_u64(at + 8) ^ load_u64(key + 8));
}

/* The checksum of at most 16 bytes. */
static uint64_t sum_tiny(const uint8_t *from, int64_t length)
{
    if (length > 8) {
        uint64_t low = load_u64(from) ^ load_u64(KEY + 24) ^ load_u64(KEY + 32);
        uint64_t high = load_u64(from + length - 8) ^ load_u64(KEY + 40) ^ load_u64(KEY + 48);
        return avalanche((uint64_t)length + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (length >= 4) {
        uint64_t found = load_u32(from + length - 4) + (load_u32(from) << 32);
        found ^= load_u64(KEY + 8) ^ load_u64(KEY + 16);
        found ^= (found << 49 | found >> 15) ^ (found << 24 | found >> 40);
        found *= 0x9FB21C651E98DF25;
        found ^= (found >> 35) + (uint64_t)length;
        found *= 0x9FB21C651E98DF25;
        return found ^ found >> 28;
    }
    uint64_t found = load_u64(KEY + 56) ^ load_u64(KEY + 64);
    if (length) {
        uint64_t first = from[0], middle = from[length >> 1], last = from[length - 1];
        found = (first << 16 | middle << 24 | last | (uint64_t)length << 8) ^ load_u32(KEY) ^ load_u32(KEY + 4);
    }
    found ^= found >> 33;
    found *= PRIME64[1];
    found ^= found >> 29;
    found *= PRIME64[2];
    return found ^ found >> 32;
}

/* The checksum of at most SHORT_BYTES bytes. */
static uint64_t sum_short(const uint8_t *from, int64_t length)
{
    if (length <= 16)
        return sum_tiny(from, length);
    uint64_t found = (uint64_t)length * PRIME64[0];
    if (length <= 128) {
        for (int64_t pair = (length - 1) / 32; pair >= 0; pair--)
            found += mix_16(from + 16 * pair, KEY + 32 * pair) +
                     mix_16(from + length - 16 * (pair + 1), KEY + 32 * pair + 16);
        return avalanche(found);
    }
    for (int64_t n = 0; n < 8; n++)
        found += mix_16(from + 16 * n, KEY + 16 * n);
    found = avalanche(found);
    for (int64_t n = 8; n < length / 16; n++)
        found += mix_16(from + 16 * n, KEY + 16 * (n - 8) + 3);
    return avalanche(found + mix_16(from + length - 16, KEY + 136 - 17));
}

/* The copy of one member: its bytes in the file, and the target of its data. */
struct member_copy {
    const uint8_t *stored;
    uint8_t *target;
    int64_t length, data, data_end;
    int streamed;
};

/* Load a stripe that may hold data and other bytes; copy only the data. */
static void load_mixed_stripe(const struct member_copy *member, int64_t at, uint8_t stripe[STRIPE])
{
    int64_t low = at > member->data ? at : member->data;
    int64_t high = at + STRIPE < member->data_end ? at + STRIPE : member->data_end;
    load_stripe(stripe, member->stored + at);
    if (low < high)
        memcpy(member->target + (low - member->data), stripe + (low - at), (size_t)(high - low));
}

/* Do as copy_and_sum for a short member. */
static uint64_t copy_short(const struct member_copy *member)
{
    uint8_t content[SHORT_BYTES];
    memcpy(content, member->stored, (size_t)member->length);
    __asm__("" : "+m"(content));
    if (member->target)
        memcpy(member->target, content + member->data, (size_t)(member->data_end - member->data));
    return sum_short(content, member->length);
}

/* Copy the data of a member; return the checksum of the whole member, header and padding included. */
static uint64_t copy_and_sum(const struct member_copy *member, add_stripes *add)
{
    if (member->length <= SHORT_BYTES)
        return copy_short(member);
    struct xxh3 xxh3 = {
        {PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2], PRIME64[3], PRIME32[1], PRIME64[4], PRIME32[0]}, 0};
    const int64_t stripes = (member->length - 1) / STRIPE;
    uint8_t stripe[STRIPE];
    while (xxh3.stripes < stripes) {
        const int64_t at = STRIPE * xxh3.stripes;
        const int inside = at >= member->data && at < member->data_end;
        int64_t count = stripes - xxh3.stripes;
        if (at < member->data_end) {
            int64_t whole = ((inside ? member->data_end : member->data) - at) / STRIPE;
            count = whole < count ? whole : count;
        }
        if (!count) { /* data begin or end within this stripe */
            load_mixed_stripe(member, at, stripe);
            add(&xxh3, stripe, 1, NULL, NOWHERE);
        } else if (inside) {
            uint8_t *to = member->target + (at - member->data);
            add(&xxh3, member->stored + at, count, to, member->streamed && !((uintptr_t)to % LINE) ? STREAMED : CACHED);
        } else {
            add(&xxh3, member->stored + at, count, NULL, NOWHERE);
        }
    }
    load_mixed_stripe(member, member->length - STRIPE, stripe);
    add_stripe(xxh3.lanes, stripe, KEY + LAST_KEY);
    return merge_lanes(xxh3.lanes, (uint64_t)member->length);
}

/* -- check all that is given --------------------------------------------------------------------------------------- */

/* The members of every item: the same table for all items, or one row per item. */
struct members {
    const struct member *first;
    int64_t count;
    int one_each;
    int streamed; /* use non-temporal stores */
};

static const struct member *members_of(const struct members *members, int64_t item)
{
    return members->first + (members->one_each ? item : 0);
}

static int64_t extent_bytes(const struct members *members, int64_t item)
{
    return members_of(members, item)[members->count - 1].end;
}

/* Which items to copy, from where and to where. */
struct request {
    int64_t n_items, n_shards;
    const struct shard *shards;
    const int64_t *shard, *begin, *place;
    const struct target *targets;
    const uint8_t *unverified;
    uint64_t mask; /* of the bits of a checksum that are stored */
};

/* Whether a member lies within an extent. */
static int is_member_valid(const struct member *member, int64_t extent)
{
    return member->begin >= 0 && member->data >= member->begin && member->end >= member->data &&
           member->end <= extent && member->n_bytes >= 0 && member->n_bytes <= member->end - member->data;
}

/* Return how many rows all targets have; 0 if a member that is the same for all items is not valid. */
static int64_t count_rows(const struct request *request, const struct members *members)
{
    int64_t rows = INT64_MAX;
    for (int64_t n = 0; n < members->count; n++) {
        const struct member *member = members->first + n;
        const struct target *target = request->targets + n;
        if (!is_member_valid(member, extent_bytes(members, 0)) || target->n_bytes < 0)
            return 0;
        if (!member->n_bytes)
            continue;
        int64_t fit = target->first ? target->n_bytes / member->n_bytes : 0;
        rows = fit < rows ? fit : rows;
    }
    return rows;
}

/* Whether a shard has a map, of the size that it says. */
static int is_mapped(const struct shard *shard)
{
    return shard->n_bytes >= 0 && (shard->map || !shard->n_bytes) &&
           (uintptr_t)shard->n_bytes <= UINTPTR_MAX - (uintptr_t)shard->map;
}

/* Return the number of items before the first one whose bytes are not within its shard or do not fit into a target. */
static int64_t count_valid(const struct request *request, const struct members *members)
{
    if (request->n_items <= 0 || members->count < 1 || request->targets->n_bytes < 0)
        return 0;
    int64_t rows = members->one_each ? 0 : count_rows(request, members);
    int64_t item = 0, mapped = -1; /* the shard of the item before */
    for (; item < request->n_items; item++) {
        int64_t shard = request->shard[item], place = request->place[item], begin = request->begin[item];
        if (shard < 0 || shard >= request->n_shards || (shard != mapped && !is_mapped(request->shards + shard)))
            break;
        mapped = shard;
        if (members->one_each) {
            const struct member *member = members_of(members, item);
            const struct target *target = request->targets;
            if (!is_member_valid(member, member->end) || place > target->n_bytes - member->n_bytes ||
                (member->n_bytes && !target->first))
                break;
        } else if (place >= rows) {
            break;
        }
        if (place < 0 || begin < 0 || begin > request->shards[shard].n_bytes - extent_bytes(members, item))
            break;
    }
    return item;
}

/* -- the page cache ------------------------------------------------------------------------------------------------ */

/* What was found about pieces, one after the other. */
struct probes {
    int missing; /* how many of the next ones are assumed to be missing */
    int present; /* how many were there since one was missing */
    int spared;  /* whether large ranges are looked at less if so many were there */
};

/* Whether a byte of a file is in the page cache. */
static int is_there(int file, int64_t at)
{
#if defined(RWF_NOWAIT)
    uint8_t byte;
    struct iovec place = {&byte, 1};
    return preadv2(file, &place, 1, at, RWF_NOWAIT) == 1;
#else /* nobody can tell; what is not there is read when it is needed */
    (void)file, (void)at;
    return 1;
#endif
}

/* Whether [begin, end) of a file is in the page cache: whether its middle is, and a place before it, because one page
 * may be there without the others, such as that of a small member. Its ends may lie on pages of others.
 *
 * Looking at a page that is missing starts reading it, apart from those around it. So after one that is missing, the next
 * ones are assumed to be.
 */
static int is_resident(int file, int64_t begin, int64_t end, struct probes *probes)
{
    if (probes->missing) {
        probes->missing--;
        return 0;
    }
    const int resident = is_there(file, begin + (end - begin) / 2) && is_there(file, begin + (end - begin) / 4);
    probes->missing = resident ? 0 : ASSUMED_PIECES;
    probes->present = !resident ? 0 : probes->present < PRESENT_PIECES ? probes->present + 1 : PRESENT_PIECES;
    return resident;
}

/* Ask the kernel to read [begin, end). After one call it reads as much as the device accepts at once, which may be no
 * more than LEAST_PIECE; the other calls find in the page cache what the first one has asked for. */
static void ask(int file, int64_t begin, int64_t end)
{
    posix_fadvise(file, begin, end - begin, POSIX_FADV_WILLNEED);
    while (end - begin > LEAST_PIECE) {
        begin += LEAST_PIECE;
        posix_fadvise(file, begin, LEAST_PIECE < end - begin ? LEAST_PIECE : end - begin, POSIX_FADV_WILLNEED);
    }
}

/* Start reading what is not in the page cache of [begin, end); return the bytes. */
static int64_t read_ahead(int64_t file, int64_t begin, int64_t end, struct probes *probes)
{
    int64_t missing = 0, first = begin; /* [first, begin) is missing, and not yet asked for */
    if (file < 0 || file > INT_MAX)
        return 0;
    if (probes->spared && probes->present == PRESENT_PIECES) {
        if (is_there((int)file, begin + (end - begin) / 2))
            return 0;
        *probes = (struct probes){ASSUMED_PIECES, 0, probes->spared};
    }
    while (begin < end) {
        const int64_t stop = LEAST_PIECE < end - begin ? begin + LEAST_PIECE : end;
        const int resident = is_resident((int)file, begin, stop, probes);
        const int64_t last = resident ? begin : stop;
        if (last > first && (resident || stop == end)) {
            ask((int)file, first, last);
            missing += last - first;
        }
        begin = stop;
        first = resident ? stop : first;
    }
    return missing;
}

/* Start reading all large items that are not in the page cache. Page faults would alternate reading and copying. */
static void request_readahead(const struct request *request, int64_t n_items, const struct members *members)
{
    struct probes probes = {0, 0, 1};
    for (int64_t item = 0; item < n_items; item++) {
        const int64_t n_bytes = extent_bytes(members, item), begin = request->begin[item];
        if (n_bytes >= READAHEAD_BYTES)
            read_ahead(request->shards[request->shard[item]].file, begin, begin + n_bytes, &probes);
    }
}

/* Byte ranges of files, ordered by file and begin. */
struct ranges {
    int64_t count, n_shards;
    const struct shard *shards;
    const int64_t *shard, *begin, *end;
};

/* Find the next range within its file, joined with those that begin at most `gap` bytes after it; return the number of
 * the range after them, or -1 at the end. */
static int64_t next_range(const struct ranges *ranges, int64_t number, int64_t gap, int64_t *begin, int64_t *end)
{
    for (; number < ranges->count; number++) {
        const int64_t shard = ranges->shard[number];
        if (shard < 0 || shard >= ranges->n_shards)
            continue;
        const int64_t n_bytes = ranges->shards[shard].n_bytes;
        *begin = ranges->begin[number] > 0 ? ranges->begin[number] : 0;
        *end = ranges->end[number] < n_bytes ? ranges->end[number] : n_bytes;
        if (*begin >= *end)
            continue;
        for (number++; number < ranges->count; number++) {
            const int64_t next = ranges->begin[number];
            if (ranges->shard[number] != shard || next < *begin || next >= n_bytes || next - *end > gap)
                break;
            const int64_t stop = ranges->end[number] < n_bytes ? ranges->end[number] : n_bytes;
            *end = stop > *end ? stop : *end;
        }
        return number;
    }
    return -1;
}

/* -- copy items ---------------------------------------------------------------------------------------------------- */

/* Load the beginning of an item into the caches while the item before it is copied. */
static void prefetch_item(const uint8_t *extent, int64_t n_bytes)
{
    for (int64_t at = 0; at < n_bytes && at < AHEAD_BYTES; at += LINE)
        __builtin_prefetch(extent + at);
}

/* Copy the members of one item, whose bytes begin at `extent`.
 *
 * checksums: NULL, or the checksum of its first member, with that of the next one `n_items` numbers further.
 *
 * Returns the first member whose checksum does not match, or -1.
 */
static int64_t copy_item(const uint8_t *extent, const struct members *members, int64_t item,
                         const struct request *request, const uint64_t *checksums)
{
    const struct target *targets = request->targets;
    const int64_t place = request->place[item];
    add_stripes *add = choose_add_stripes();
    for (int64_t n = 0; n < members->count; n++) {
        const struct member *member = members_of(members, item) + n;
        int streamed = members->streamed && member->n_bytes >= STREAMED_MEMBER;
        /* Without data, there may be no target. */
        uint8_t *target = member->n_bytes ? targets[n].first + place * (members->one_each ? 1 : member->n_bytes) : NULL;
        if (checksums) {
            int64_t data = member->data - member->begin;
            struct member_copy copy = {
                extent + member->begin, target, member->end - member->begin, data, data + member->n_bytes, streamed};
            if ((copy_and_sum(&copy, add) ^ checksums[n * request->n_items]) & request->mask)
                return n;
        } else if (streamed && target) {
            stream(target, extent + member->data, member->n_bytes);
        } else if (target) {
            memcpy(target, extent + member->data, (size_t)member->n_bytes);
        }
    }
    return -1;
}

/* Copy the first `n_items` items, which are valid; return how many were copied, and set `wrong` as penstock_copy does. */
__attribute__((noinline)) /* so that no variable is changed between sigsetjmp and siglongjmp but the volatile one */
static int64_t copy_valid(const struct request *request, int64_t n_items, const struct members *members,
                          const uint64_t *checksums, int64_t *wrong)
{
    struct guarded_read mine;
    volatile int64_t item = 0;
    if (!sigsetjmp(mine.escape, 0)) {
        for (; item < n_items && *wrong < 0; item += *wrong < 0) {
            const int64_t *shard = request->shard + item, *begin = request->begin + item;
            const int64_t n_bytes = extent_bytes(members, item);
            const uint8_t *extent = request->shards[*shard].map + *begin;
            int verify = request->unverified && request->unverified[item];
            if (verify && item + 1 < n_items && n_bytes < READAHEAD_BYTES) /* memcpy overlaps items by itself */
                prefetch_item(request->shards[shard[1]].map + begin[1], extent_bytes(members, item + 1));
            mine.low = (uintptr_t)extent;
            mine.high = mine.low + (uintptr_t)n_bytes;
            current_read = &mine;
            atomic_signal_fence(memory_order_seq_cst); /* all reads happen while current_read is set */
            *wrong = copy_item(extent, members, item, request, verify ? checksums + item : NULL);
            atomic_signal_fence(memory_order_seq_cst);
            current_read = NULL;
        }
    }
    current_read = NULL;
    fence_streams();
    return item;
}

/* -- take items of a dataset whose shards are open ------------------------------------------------------------------ */

/* Where the rows of one field lie in a shard, and their checksums in its side index. The same numbers as `_COLUMN` in
 * tar/open_table.py. */
struct column {
    int64_t first, step, at; /* row r begins at first + r * step; `at`: that is stored at byte at + 8 r of the side index */
    const int64_t *begins;   /* not NULL: row r begins at begins[block] + (r - starts[block]) * step */
    struct member member;    /* from that byte on */
    int64_t checksums_at, checksum_bytes;
};

/* An open shard. */
struct part {
    struct shard file, index;
    int64_t n_rows, n_blocks;
    const int64_t *starts; /* the first row of each block, then n_rows */
    struct column columns[];
};

/* A dataset: what is known of it between calls. */
struct dataset {
    int64_t n_shards, n_columns;
    const int64_t *borders;          /* first item of each shard, then the number of items */
    const struct part *const *parts; /* NULL: the shard is not open, or cannot be read here */
    uint8_t *const *verified;        /* for each shard, one bit for each item; NULL: none is */
    int64_t verify;                  /* 0: never */
    int64_t settled_ns;              /* a file that was written to later may change without another ctime */
};

/* An item to take. */
struct taken {
    int64_t place, row, shard;
    int verify;
};

/* Return the last of `count` numbers that is not larger than `wanted`, the first of them if all are; they are sorted. */
static int64_t find_last(const int64_t *numbers, int64_t count, int64_t wanted)
{
    int64_t low = 0;
    while (count > 1) {
        int64_t half = count / 2;
        low = numbers[low + half] <= wanted ? low + half : low;
        count -= half;
    }
    return low;
}

/* An item, and its number in the batch. */
struct wanted {
    uint64_t item;
    int64_t number;
};

/* Sort by item: neighbours are read one after the other, and each shard is looked at once. `spare` has room for as many.
 * Few are inserted; of many, one byte after the other is sorted, from the lowest on. */
static struct wanted *sort_wanted(struct wanted *wanted, struct wanted *spare, int64_t count)
{
    uint64_t bits = 0;
    if (count <= LINE) {
        for (int64_t n = 1; n < count; n++) {
            struct wanted moved = wanted[n];
            int64_t at = n;
            for (; at && wanted[at - 1].item > moved.item; at--)
                wanted[at] = wanted[at - 1];
            wanted[at] = moved;
        }
        return wanted;
    }
    for (int64_t n = 0; n < count; n++)
        bits |= wanted[n].item;
    for (int shift = 0; shift < 64 && bits >> shift; shift += 8) {
        int64_t ends[256] = {0}, end = 0;
        for (int64_t n = 0; n < count; n++)
            ends[wanted[n].item >> shift & 255]++;
        for (int byte = 0; byte < 256; byte++) {
            int64_t begin = end;
            end += ends[byte];
            ends[byte] = begin;
        }
        for (int64_t n = 0; n < count; n++)
            spare[ends[wanted[n].item >> shift & 255]++] = wanted[n];
        struct wanted *sorted = spare;
        spare = wanted;
        wanted = sorted;
    }
    return wanted;
}

/* Find the shards of all items, which are sorted; return whether they are open. */
static int find_shards(const struct dataset *data, int64_t n_items, const struct wanted *wanted, const int64_t *places,
                       struct taken *taken)
{
    int64_t shard = -1;
    for (int64_t n = 0; n < n_items; n++) {
        const uint64_t item = wanted[n].item; /* a negative one is huge */
        if (item >= (uint64_t)data->borders[data->n_shards])
            return 0;
        if (shard < 0 || item >= (uint64_t)data->borders[shard + 1])
            shard = find_last(data->borders, data->n_shards, (int64_t)item);
        const int64_t row = (int64_t)item - data->borders[shard];
        if (!data->parts[shard] || row >= data->parts[shard]->n_rows)
            return 0;
        int verify = data->verify != 0;
        if (data->verified)
            verify = !(data->verified[shard][row >> 3] >> (row & 7) & 1);
        taken[n] = (struct taken){places ? places[wanted[n].number] : wanted[n].number, row, shard, verify};
    }
    return 1;
}

/* Read a number of `n_bytes` bytes from a side index; return whether it lies within. */
static int read_number(const struct shard *index, int64_t at, int64_t row, int64_t n_bytes, struct guarded_read *mine,
                       uint64_t *found)
{
    if (at < 0 || at > index->n_bytes || row > (index->n_bytes - at) / n_bytes - 1)
        return 0;
    const uint8_t *from = index->map + at + n_bytes * row;
    mine->low = (uintptr_t)from;
    mine->high = mine->low + (uintptr_t)n_bytes;
    atomic_signal_fence(memory_order_seq_cst);
    *found = n_bytes == 8 ? load_u64(from) : load_u32(from);
    atomic_signal_fence(memory_order_seq_cst);
    return 1;
}

/* Find where a row of a column begins; return whether it lies within the file. */
static int find_begin(const struct part *part, const struct column *column, int64_t row, struct guarded_read *mine,
                      int64_t *begin)
{
    int64_t first = column->first, distance = row;
    if (!is_member_valid(&column->member, column->member.end))
        return 0;
    if (column->at) {
        if (!read_number(&part->index, column->at, row, 8, mine, (uint64_t *)begin))
            return 0;
    } else {
        if (column->begins) {
            const int64_t block = find_last(part->starts, part->n_blocks, row);
            first = column->begins[block];
            distance = row - part->starts[block];
        }
        if (__builtin_mul_overflow(distance, column->step, begin) || __builtin_add_overflow(*begin, first, begin))
            return 0;
    }
    return *begin >= 0 && *begin <= part->file.n_bytes - column->member.end;
}

/* Copy one row of a column, and verify it if needed; return whether it is there and right. */
static int take_row(const struct part *part, const struct column *column, int64_t begin, const struct taken *taken,
                    const struct target *target, int streamed, struct guarded_read *mine)
{
    const struct member *member = &column->member;
    uint64_t expected = 0;
    int64_t place;
    if (__builtin_mul_overflow(taken->place, member->n_bytes, &place) || place < 0 ||
        place > target->n_bytes - member->n_bytes)
        return 0;
    if (taken->verify &&
        !read_number(&part->index, column->checksums_at, taken->row, column->checksum_bytes, mine, &expected))
        return 0;
    const uint8_t *from = part->file.map + begin;
    uint8_t *to = member->n_bytes ? target->first + place : NULL;
    uint64_t found = expected;
    mine->low = (uintptr_t)from;
    mine->high = mine->low + (uintptr_t)member->end;
    atomic_signal_fence(memory_order_seq_cst); /* all reads happen while these are guarded */
    streamed = streamed && member->n_bytes >= STREAMED_MEMBER;
    if (taken->verify) {
        int64_t data = member->data - member->begin;
        struct member_copy copy = {
            from + member->begin, to, member->end - member->begin, data, data + member->n_bytes, streamed};
        found = copy_and_sum(&copy, choose_add_stripes());
        found = column->checksum_bytes == 8 ? found : found & 0xFFFFFFFF;
    } else if (streamed) {
        stream(to, from + member->data, member->n_bytes);
    } else if (to) {
        memcpy(to, from + member->data, (size_t)member->n_bytes);
    }
    atomic_signal_fence(memory_order_seq_cst);
    return found == expected;
}

enum { BEGINS_AHEAD = 4 }; /* rows that are found and loaded into the caches before they are copied */

/* Take one column of all items, or start reading what is large and missing; return whether all is there and right. */
__attribute__((noinline)) /* as copy_valid */
static int take_column(const struct dataset *data, int64_t number, int64_t n_items, const struct taken *taken,
                       const struct target *target, int streamed)
{
    struct guarded_read mine = {.low = 0, .high = 0};
    volatile int done = 0;
    if (!sigsetjmp(mine.escape, 0)) {
        int64_t begins[BEGINS_AHEAD];
        int right = 1;
        struct probes probes = {0, 0, 1};
        current_read = &mine;
        for (int64_t n = 0; n < n_items + BEGINS_AHEAD && right; n++) {
            const int64_t last = n - BEGINS_AHEAD;
            if (last >= 0 && target) {
                const struct part *part = data->parts[taken[last].shard];
                right = take_row(part, part->columns + number, begins[last % BEGINS_AHEAD], taken + last, target,
                                 streamed, &mine);
            }
            if (n >= n_items || !right)
                continue;
            const struct part *part = data->parts[taken[n].shard];
            const struct member *member = &part->columns[number].member;
            int64_t begin;
            right = find_begin(part, part->columns + number, taken[n].row, &mine, &begin);
            begins[n % BEGINS_AHEAD] = begin;
            if (right && !target)
                read_ahead(part->file.file, begin, begin + member->end, &probes);
            else if (right && member->end < READAHEAD_BYTES)
                prefetch_item(part->file.map + begin + member->data, member->n_bytes);
        }
        done = right;
    }
    current_read = NULL;
    fence_streams();
    return done;
}

/* Take all columns. Large ones are read ahead, all of them, before anything is copied. */
static int take_columns(const struct dataset *data, int64_t n_items, const struct taken *taken,
                        const struct target *targets)
{
    const struct column *columns = data->parts[taken->shard]->columns;
    int64_t item_bytes = 0, batch_bytes;
    int done = 1;
    for (int64_t n = 0; n < data->n_columns; n++) {
        if (__builtin_add_overflow(item_bytes, columns[n].member.end, &item_bytes))
            item_bytes = INT64_MAX;
        if (columns[n].member.end >= READAHEAD_BYTES)
            done = done && take_column(data, n, n_items, taken, NULL, 0);
    }
    if (__builtin_mul_overflow(item_bytes, n_items, &batch_bytes))
        batch_bytes = INT64_MAX;
    const struct timed_copy copy = begin_copy(batch_bytes >= STREAMED_BATCH, taken->verify);
    for (int64_t n = 0; done && n < data->n_columns; n++)
        done = take_column(data, n, n_items, taken, targets + n, copy.streamed);
    end_copy(&copy, done ? batch_bytes : 0);
    return done;
}

/* Whether the file of a shard was written to since it was mapped. */
static int is_changed(const struct shard *shard)
{
    struct stat now;
    if (shard->file < 0 || shard->file > INT_MAX || fstat((int)shard->file, &now))
        return 1;
    /* Compare ctime, not mtime: copying programs may set mtime back. */
    uint64_t changed_ns = (uint64_t)now.st_ctim.tv_sec * 1000000000 + (uint64_t)now.st_ctim.tv_nsec;
    return now.st_size != shard->n_bytes || changed_ns != (uint64_t)shard->changed_ns;
}

/* Return whether no file was written to that was read. A side index counts if it says where rows lie; if only checksums
 * are read from it, a wrong one cannot make wrong bytes right. */
static int are_unchanged(const struct dataset *data, int64_t n_items, const struct taken *taken)
{
    for (int64_t n = 0; n < n_items; n++) {
        const struct part *part = data->parts[taken[n].shard];
        int read_index = 0;
        if (n && taken[n - 1].shard == taken[n].shard)
            continue;
        for (int64_t column = 0; column < data->n_columns; column++)
            read_index |= part->columns[column].at != 0;
        if (is_changed(&part->file) || (read_index && is_changed(&part->index)))
            return 0;
    }
    return 1;
}

/* -- called from Python ------------------------------------------------------------------------------------------- */

enum { UNREADABLE = -1, INVALID = -2 };

/* Copy the members of items into rows of the target arrays.
 *
 * shard, begin: for each item, its row in `shards` and the offset of its extent there.
 * one_each: 1 if every item has a single member of its own size. `place` is then a byte offset in the only target.
 * targets: for each member, an array whose rows have the member's n_bytes.
 * place: for each item, its row in the targets.
 * unverified: NULL, or for each item whether to compare checksums.
 * checksums: with unverified, (members, items): the checksum of each member of each item.
 * mask: the bits of checksums that are compared.
 *
 * Returns the number of items copied. If it is less than n_items, `wrong` is the member of the next item whose checksum
 * does not match, UNREADABLE if that item cannot be read, or INVALID if it does not lie within its shard or does not
 * fit into the targets. Returns -1 if SIGBUS cannot be caught.
 */
int64_t penstock_copy(int64_t n_items, int64_t n_shards, const struct shard *shards, const int64_t *shard,
                      const int64_t *begin, int64_t n_members, const struct member *first_member, int64_t one_each,
                      const struct target *targets, const int64_t *place, const uint8_t *unverified,
                      const uint64_t *checksums, uint64_t mask, int64_t *wrong)
{
    const struct request request = {n_items, n_shards, shards, shard, begin, place, targets, unverified, mask};
    struct members members = {first_member, n_members, one_each != 0, 0};
    const int64_t n_valid = count_valid(&request, &members);
    int64_t batch_bytes = 0;
    if (!one_each && n_valid) /* members of varying size are decoded right after, so they should stay in the caches */
        if (__builtin_mul_overflow(n_valid, extent_bytes(&members, 0), &batch_bytes))
            batch_bytes = INT64_MAX;
    *wrong = UNREADABLE;
    if (!install_handler())
        return -1;
    request_readahead(&request, n_valid, &members);
    const int is_large = !one_each && n_valid && batch_bytes >= STREAMED_BATCH;
    const struct timed_copy copy = begin_copy(is_large, unverified && n_valid && unverified[0]);
    members.streamed = copy.streamed;
    const int64_t n_copied = copy_valid(&request, n_valid, &members, checksums, wrong);
    end_copy(&copy, n_copied == n_valid ? batch_bytes : 0);
    if (n_copied == n_valid && n_valid < n_items)
        *wrong = INVALID;
    return n_copied;
}

/* Read items of a dataset into rows of the target arrays, one for each column.
 *
 * places: for each item, its row in the targets; NULL: its number.
 *
 * Returns -1 if not all items were read, verified as far as needed, or a file was written to meanwhile; why is for
 * others to find out. Rows of the targets may have been written to. Otherwise 0 if nothing was verified, or a time in
 * ns: files that were not written to since stay as they were verified for as long as their ctime does.
 */
int64_t penstock_take(const struct dataset *data, int64_t n_items, const int64_t *items, const int64_t *places,
                      const struct target *targets)
{
    struct timespec began;
    struct {
        struct wanted wanted[LINE];
        struct taken taken[LINE];
    } few;
    struct wanted *wanted = few.wanted;
    struct taken *taken = few.taken;
    if (n_items <= 0 || clock_gettime(CLOCK_REALTIME, &began) || !install_handler())
        return -1;
    if (n_items > LINE) { /* with room to sort */
        if (!(wanted = malloc((size_t)n_items * (2 * sizeof *wanted + sizeof *taken))))
            return -1;
        taken = (struct taken *)(wanted + 2 * n_items);
    }
    for (int64_t n = 0; n < n_items; n++)
        wanted[n] = (struct wanted){(uint64_t)items[n], n};
    const struct wanted *sorted = sort_wanted(wanted, wanted + n_items, n_items);
    int done = find_shards(data, n_items, sorted, places, taken), verified = 0;
    done = done && take_columns(data, n_items, taken, targets) && are_unchanged(data, n_items, taken);
    for (int64_t n = 0; done && n < n_items; n++)
        verified |= taken[n].verify;
    if (wanted != few.wanted)
        free(wanted);
    return !done ? -1 : verified ? (int64_t)began.tv_sec * 1000000000 + began.tv_nsec - data->settled_ns : 0;
}

/* Note in the bits of a dataset that items were verified, but not those of shards that were written to since a time.
 * The caller holds a lock. */
void penstock_mark(const struct dataset *data, int64_t n_items, const int64_t *items, int64_t settled)
{
    for (int64_t n = 0; n < n_items; n++) {
        const int64_t shard = find_last(data->borders, data->n_shards, items[n]);
        const int64_t row = items[n] - data->borders[shard];
        if (data->parts[shard]->file.changed_ns < settled && data->parts[shard]->index.changed_ns < settled)
            data->verified[shard][row >> 3] |= (uint8_t)(1 << (row & 7));
    }
}

/* Set changed[n] to whether the file of shard n was written to since it was mapped. */
void penstock_changed(int64_t n_shards, const struct shard *shards, uint8_t *changed)
{
    for (int64_t n = 0; n < n_shards; n++)
        changed[n] = (uint8_t)is_changed(shards + n);
}

/* Start reading byte ranges into the page cache, without waiting for them. Return the bytes that were not there.
 *
 * shard, begin, end: for each range, its row in `shards` and its bytes, ordered by row and begin.
 * gap: ranges that are not further apart are joined.
 */
int64_t penstock_read_ahead(int64_t n_ranges, int64_t n_shards, const struct shard *shards, const int64_t *shard,
                            const int64_t *begin, const int64_t *end, int64_t gap)
{
    const struct ranges ranges = {n_ranges, n_shards, shards, shard, begin, end};
    int64_t missing = 0, low, high, next;
    struct probes probes = {0, 0, 0};
    for (int64_t number = 0; (next = next_range(&ranges, number, gap, &low, &high)) >= 0; number = next)
        missing += read_ahead(shards[shard[next - 1]].file, low, high, &probes);
    return missing;
}

/* Give the pages of byte ranges back: those that hold nothing else. The arguments are those of penstock_read_ahead. */
void penstock_give_back(int64_t n_ranges, int64_t n_shards, const struct shard *shards, const int64_t *shard,
                        const int64_t *begin, const int64_t *end, int64_t page)
{
    const struct ranges ranges = {n_ranges, n_shards, shards, shard, begin, end};
    int64_t low, high, next;
    for (int64_t number = 0; (next = next_range(&ranges, number, 0, &low, &high)) >= 0; number = next) {
        const struct shard *from = shards + shard[next - 1];
        low = (low + page - 1) / page * page;
        /* The last page of a file holds nothing else. */
        high = high == from->n_bytes ? (high + page - 1) / page * page : high / page * page;
        if (low >= high || from->file < 0 || from->file > INT_MAX)
            continue;
        if (from->map && is_mapped(from)) /* pages that are mapped are not given back */
            madvise((uint8_t *)from->map + low, (size_t)(high - low), MADV_DONTNEED);
        posix_fadvise((int)from->file, low, high - low, POSIX_FADV_DONTNEED);
    }
}
