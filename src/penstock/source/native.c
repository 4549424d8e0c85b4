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
#include <fcntl.h>
#include <limits.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The checksums are implemented for little-endian processors only."
#endif

#define READAHEAD_BYTES (1 << 15) /* from this size on, checking the page cache costs little compared with copying */
#define LEAST_PIECE (1 << 17)     /* that every kernel reads ahead after one call */
#define ASSUMED_PIECES 15         /* assumed to be missing after one that is */

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
static _Thread_local struct guarded_read *volatile current_read __attribute__((tls_model("initial-exec")));
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

/* A batch larger than the caches has left them by the time it is used. Non-temporal stores bypass the caches and spare
 * reading the lines that they overwrite. From these sizes on they are faster, even if the batch is read right after. */
#ifndef STREAMED_BATCH /* tests set smaller sizes */
#define STREAMED_BATCH (6 << 20)
#define STREAMED_MEMBER (1 << 14)
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

/* -- XXH3, 64 bits, without a seed, for inputs of more than 240 bytes ---------------------------------------------- */

enum { STRIPE = 64, BLOCK_STRIPES = 16, KEY_BYTES = 192, LAST_KEY = KEY_BYTES - STRIPE - 7, MERGE_KEY = 11 };
enum { LEAST_SUMMED = 241 }; /* bytes */

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

static uint64_t merge_lanes(const uint64_t lanes[8], uint64_t length)
{
    uint64_t found = length * PRIME64[0];
    for (int lane = 0; lane < 8; lane += 2) {
        const uint8_t *key = KEY + MERGE_KEY + 8 * lane;
        __uint128_t product = (__uint128_t)(lanes[lane] ^ load_u64(key)) * (lanes[lane + 1] ^ load_u64(key + 8));
        found += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    found ^= found >> 37;
    found *= 0x165667919E3779F9;
    return found ^ found >> 32;
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

/* Copy the data of a member; return the checksum of the whole member, header and padding included. */
static uint64_t copy_and_sum(const struct member_copy *member, add_stripes *add)
{
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
};

/* Whether a member lies within an extent, and is long enough for the checksum if that is computed. */
static int is_member_valid(const struct member *member, int64_t extent, int summed)
{
    return member->begin >= 0 && member->data >= member->begin && member->end >= member->data &&
           member->end <= extent && member->n_bytes >= 0 && member->n_bytes <= member->end - member->data &&
           (!summed || member->end - member->begin >= LEAST_SUMMED);
}

/* Return how many rows all targets have; 0 if a member that is the same for all items is not valid. */
static int64_t count_rows(const struct request *request, const struct members *members)
{
    int64_t rows = INT64_MAX;
    for (int64_t n = 0; n < members->count; n++) {
        const struct member *member = members->first + n;
        const struct target *target = request->targets + n;
        if (!is_member_valid(member, extent_bytes(members, 0), request->unverified != NULL) || target->n_bytes < 0)
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
            int summed = request->unverified && request->unverified[item];
            const struct target *target = request->targets;
            if (!is_member_valid(member, member->end, summed) || place > target->n_bytes - member->n_bytes ||
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

/* Whether [begin, end) of a file is in the page cache: whether its middle is, and a place before it, because one page
 * may be there without the others, such as that of a small member. Its ends may lie on pages of others.
 *
 * Looking at a page that is missing starts reading it, apart from those around it. So after one that is missing, the next
 * ones are assumed to be: `assumed` counts down how many.
 */
static int is_resident(int file, int64_t begin, int64_t end, int *assumed)
{
    uint8_t byte;
    struct iovec place = {&byte, 1};
    if (*assumed) {
        --*assumed;
        return 0;
    }
    const int resident = preadv2(file, &place, 1, begin + (end - begin) / 2, RWF_NOWAIT) == 1 &&
                         preadv2(file, &place, 1, begin + (end - begin) / 4, RWF_NOWAIT) == 1;
    *assumed = resident ? 0 : ASSUMED_PIECES;
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
static int64_t read_ahead(int64_t file, int64_t begin, int64_t end, int *assumed)
{
    int64_t missing = 0, first = begin; /* [first, begin) is missing, and not yet asked for */
    if (file < 0 || file > INT_MAX)
        return 0;
    while (begin < end) {
        const int64_t stop = LEAST_PIECE < end - begin ? begin + LEAST_PIECE : end;
        const int resident = is_resident((int)file, begin, stop, assumed);
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
    int assumed = 0;
    for (int64_t item = 0; item < n_items; item++) {
        const int64_t n_bytes = extent_bytes(members, item), begin = request->begin[item];
        if (n_bytes >= READAHEAD_BYTES)
            read_ahead(request->shards[request->shard[item]].file, begin, begin + n_bytes, &assumed);
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
 * checksums: NULL, or the checksum of its first member, with that of the next `step` numbers further.
 *
 * Returns the first member whose checksum does not match, or -1.
 */
static int64_t copy_item(const uint8_t *extent, const struct members *members, int64_t item,
                         const struct target *targets, int64_t place, const uint64_t *checksums, int64_t step)
{
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
            if (copy_and_sum(&copy, add) != checksums[n * step])
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
            *wrong = copy_item(extent, members, item, request->targets, request->place[item],
                               verify ? checksums + item : NULL, request->n_items);
            atomic_signal_fence(memory_order_seq_cst);
            current_read = NULL;
        }
    }
    current_read = NULL;
    fence_streams();
    return item;
}

/* -- called from Python ------------------------------------------------------------------------------------------- */

enum { UNREADABLE = -1, INVALID = -2 };

/* Copy the members of items into rows of the target arrays.
 *
 * shard, begin: for each item, its row in `shards` and the offset of its extent there.
 * one_each: 1 if every item has a single member of its own size. `place` is then a byte offset in the only target.
 * targets: for each member, an array whose rows have the member's n_bytes.
 * place: for each item, its row in the targets.
 * unverified: NULL, or for each item whether to compare checksums. Members must have more than 240 bytes.
 * checksums: with unverified, (members, items): the checksum of each member of each item.
 *
 * Returns the number of items copied. If it is less than n_items, `wrong` is the member of the next item whose checksum
 * does not match, UNREADABLE if that item cannot be read, or INVALID if it does not lie within its shard or does not
 * fit into the targets. Returns -1 if SIGBUS cannot be caught.
 */
int64_t penstock_copy(int64_t n_items, int64_t n_shards, const struct shard *shards, const int64_t *shard,
                      const int64_t *begin, int64_t n_members, const struct member *first_member, int64_t one_each,
                      const struct target *targets, const int64_t *place, const uint8_t *unverified,
                      const uint64_t *checksums, int64_t *wrong)
{
    const struct request request = {n_items, n_shards, shards, shard, begin, place, targets, unverified};
    struct members members = {first_member, n_members, one_each != 0, 0};
    const int64_t n_valid = count_valid(&request, &members);
    int64_t batch_bytes;
    if (!one_each && n_valid) /* members of varying size are decoded right after, so they should stay in the caches */
        members.streamed = __builtin_mul_overflow(n_valid, extent_bytes(&members, 0), &batch_bytes) ||
                           batch_bytes >= STREAMED_BATCH;
    *wrong = UNREADABLE;
    if (!install_handler())
        return -1;
    request_readahead(&request, n_valid, &members);
    const int64_t n_copied = copy_valid(&request, n_valid, &members, checksums, wrong);
    if (n_copied == n_valid && n_valid < n_items)
        *wrong = INVALID;
    return n_copied;
}

/* Set changed[n] to whether the file of shard n was written to since it was mapped. */
void penstock_changed(int64_t n_shards, const struct shard *shards, uint8_t *changed)
{
    for (int64_t n = 0; n < n_shards; n++) {
        struct stat now;
        const int64_t file = shards[n].file;
        changed[n] = 1;
        if (file < 0 || file > INT_MAX || fstat((int)file, &now))
            continue;
        /* Compare ctime, not mtime: copying programs may set mtime back. */
        uint64_t changed_ns = (uint64_t)now.st_ctim.tv_sec * 1000000000 + (uint64_t)now.st_ctim.tv_nsec;
        changed[n] = now.st_size != shards[n].n_bytes || changed_ns != (uint64_t)shards[n].changed_ns;
    }
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
    int assumed = 0;
    for (int64_t number = 0; (next = next_range(&ranges, number, gap, &low, &high)) >= 0; number = next)
        missing += read_ahead(shards[shard[next - 1]].file, low, high, &assumed);
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
