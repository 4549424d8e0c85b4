/* Copies spans of mapped files into arrays, and works out their checksums on the way.
 *
 * A copy out of a mapped file that has become shorter is a SIGBUS, which ends the process. Here it ends the copy: the
 * items before it count. A SIGBUS from anywhere else goes where it would have gone without this.
 *
 * Called through ctypes, which lets other Python threads run meanwhile; nothing here knows of Python.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Checksums are written for processors that put the low byte first."
#endif

#define ADVISED_BYTES (1 << 15) /* from here on, asking whether a span is in memory costs little beside copying it */

#ifndef SOURCE_DIGEST
#define SOURCE_DIGEST 0
#endif
const uint64_t penstock_source_digest = SOURCE_DIGEST; /* what this was compiled from */

/* A file, the address that it is mapped to, all of it, and when it was last changed before that. */
struct shard {
    int64_t file; /* -1: not known */
    const uint8_t *map;
    int64_t n_bytes;
    int64_t changed_ns;
};

/* One member of an item: where its bytes lie, from the beginning of the piece. As Part in pieces.py. */
struct part {
    int64_t begin; /* its header */
    int64_t data;
    int64_t n_bytes; /* of its data */
    int64_t end;     /* the end of its padding */
};

/* -- a fault in the middle of a copy ------------------------------------------------------------------------------- */

struct reading {
    sigjmp_buf escape;
    uintptr_t low, high; /* what is being read */
};

/* In memory that a thread has from its beginning: a signal handler must not be the first to ask for it. */
static _Thread_local struct reading *volatile reading __attribute__((tls_model("initial-exec")));
static struct sigaction before;

static void on_bus(int number, siginfo_t *info, void *context)
{
    (void)context;
    struct reading *mine = reading;
    uintptr_t at = (uintptr_t)info->si_addr;
    if (info->si_code > 0 && mine && mine->low <= at && at < mine->high)
        siglongjmp(mine->escape, 1);
    /* None of ours. With the handler from before in its place, the same instruction faults again. That handler may put
     * this one back, which it was set after: then it is over. */
    struct sigaction next = before;
    before = (struct sigaction){.sa_handler = SIG_DFL};
    sigaction(SIGBUS, &next, NULL);
    if (info->si_code <= 0) /* it was sent, there is no instruction */
        raise(number);
}

/* Others may have set a handler since the last copy: faulthandler, a worker of torch. */
static int handler_is_set(void)
{
    struct sigaction now;
    if (sigaction(SIGBUS, NULL, &now))
        return 0;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus)
        return 1;
    before = now;
    struct sigaction ours = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    return !sigaction(SIGBUS, &ours, NULL);
}

/* -- copies past the caches ----------------------------------------------------------------------------------------- */

/* A batch that is larger than the caches is not in them any more when somebody looks at it. Written past them, it does
 * not make the processor read what it replaces. From here on that is faster, also where all of it is read right after. */
#ifndef STREAMED_BATCH /* so that tests can try it with few bytes */
#define STREAMED_BATCH (6 << 20)
#define STREAMED_PART (1 << 14)
#endif

enum { LINE = 64, AHEAD_BYTES = 2048 };

static void stream(uint8_t *to, const uint8_t *from, int64_t n_bytes)
{
    int64_t at = 0;
#if defined(__x86_64__)
    int64_t head = -(intptr_t)to & (LINE - 1);
    if (head > n_bytes)
        head = n_bytes;
    memcpy(to, from, (size_t)head);
    for (at = head; at + LINE <= n_bytes; at += LINE) {
        const __m128i *line = (const __m128i *)(from + at);
        _mm_prefetch((const char *)line + AHEAD_BYTES, _MM_HINT_T0); /* hardware stops at the end of a page */
        __m128i words[4] = {
            _mm_loadu_si128(line), _mm_loadu_si128(line + 1), _mm_loadu_si128(line + 2), _mm_loadu_si128(line + 3)};
        for (int word = 0; word < 4; word++)
            _mm_stream_si128((__m128i *)(to + at) + word, words[word]);
    }
#endif
    memcpy(to + at, from + at, (size_t)(n_bytes - at));
}

/* Let other threads see what was streamed, before whatever they are told of it. */
static void stream_ends(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* -- XXH3, 64 bits, without a seed, of more than 240 bytes ---------------------------------------------------------- */

enum { STRIPE = 64, BLOCK_STRIPES = 16, KEY_BYTES = 192, LAST_KEY = KEY_BYTES - STRIPE - 7, MERGE_KEY = 11 };

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

static inline uint64_t number_at(const uint8_t *at)
{
    uint64_t found;
    memcpy(&found, at, sizeof found);
    return found;
}

/* What was added up so far. */
struct sums {
    uint64_t lanes[8];
    int64_t stripes;
};

enum storing { NOWHERE, CACHED, STREAMED };

/* Add stripes that lie side by side, and store them. Each is loaded once: what is added up is what is stored, whoever
 * writes to the file meanwhile. Streamed ones go to a whole line. */
typedef void add_stripes(struct sums *sums, const uint8_t *from, int64_t count, uint8_t *to, enum storing storing);

/* The compiler must not look into the file again for what is in `stripe`; so it is for all __asm__ here. */
static inline void take_stripe(uint8_t stripe[STRIPE], const uint8_t *from)
{
    memcpy(stripe, from, STRIPE);
    __asm__("" : "+m"(*(uint8_t(*)[STRIPE])stripe));
}

static inline void add_stripe(uint64_t lanes[8], const uint8_t *stripe, const uint8_t *key)
{
    for (int lane = 0; lane < 8; lane++) {
        uint64_t value = number_at(stripe + 8 * lane), mixed = value ^ number_at(key + 8 * lane);
        lanes[lane ^ 1] += value;
        lanes[lane] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
    }
}

static void add_plainly(struct sums *sums, const uint8_t *from, int64_t count, uint8_t *to, enum storing storing)
{
    for (int64_t n = 0; n < count; n++) {
        uint8_t stripe[STRIPE];
        take_stripe(stripe, from + STRIPE * n);
        if (storing != NOWHERE)
            memcpy(to + STRIPE * n, stripe, STRIPE);
        add_stripe(sums->lanes, stripe, KEY + 8 * (sums->stripes % BLOCK_STRIPES));
        if (++sums->stripes % BLOCK_STRIPES == 0)
            for (int lane = 0; lane < 8; lane++) {
                sums->lanes[lane] ^= sums->lanes[lane] >> 47;
                sums->lanes[lane] ^= number_at(KEY + KEY_BYTES - STRIPE + 8 * lane);
                sums->lanes[lane] *= PRIME32[0];
            }
    }
}

#if defined(__x86_64__)
#define FOR_AVX2 __attribute__((target("avx2")))
#define FOR_AVX512 __attribute__((target("avx512f")))

FOR_AVX2 static inline __m256i half_at(const void *at) { return _mm256_loadu_si256(at); }

FOR_AVX2 __attribute__((always_inline))
static inline void walk_avx2(struct sums *sums, const uint8_t *from, int64_t count, uint8_t *to, enum storing storing)
{
    __m256i sum[2] = {half_at(sums->lanes), half_at(sums->lanes + 4)}, prime = _mm256_set1_epi64x((int64_t)PRIME32[0]);
    int64_t in_block = sums->stripes % BLOCK_STRIPES;
    sums->stripes += count;
    for (int64_t n = 0; n < count; n++) {
        _mm_prefetch((const char *)from + STRIPE * n + AHEAD_BYTES, _MM_HINT_T0);
        for (int half = 0; half < 2; half++) {
            const int64_t at = STRIPE * n + 32 * half;
            __m256i value = half_at(from + at);
            __asm__("" : "+x"(value));
            if (storing == CACHED)
                _mm256_storeu_si256((__m256i *)(to + at), value);
            else if (storing == STREAMED)
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
    _mm256_storeu_si256((__m256i *)sums->lanes, sum[0]);
    _mm256_storeu_si256((__m256i *)(sums->lanes + 4), sum[1]);
}

FOR_AVX512 __attribute__((always_inline))
static inline void walk_avx512(struct sums *sums, const uint8_t *from, int64_t count, uint8_t *to, enum storing storing)
{
    __m512i sum = _mm512_loadu_si512(sums->lanes), prime = _mm512_set1_epi64((int64_t)PRIME32[0]);
    int64_t in_block = sums->stripes % BLOCK_STRIPES;
    sums->stripes += count;
    for (int64_t n = 0; n < count; n++) {
        _mm_prefetch((const char *)from + STRIPE * n + AHEAD_BYTES, _MM_HINT_T0);
        __m512i value = _mm512_loadu_si512(from + STRIPE * n);
        __asm__("" : "+v"(value));
        if (storing == CACHED)
            _mm512_storeu_si512(to + STRIPE * n, value);
        else if (storing == STREAMED)
            _mm512_stream_si512((__m512i *)(to + STRIPE * n), value);
        __m512i mixed = _mm512_xor_si512(value, _mm512_loadu_si512(KEY + 8 * in_block));
        __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
        __m512i swapped = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
        sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped));
        if (++in_block < BLOCK_STRIPES)
            continue;
        in_block = 0;
        mixed = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
        mixed = _mm512_xor_si512(mixed, _mm512_loadu_si512(KEY + KEY_BYTES - STRIPE));
        __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
        sum = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
    }
    _mm512_storeu_si512(sums->lanes, sum);
}

/* A loop for each way of storing. */
#define CHOOSE(walk)                                \
    if (storing == STREAMED)                        \
        walk(sums, from, count, to, STREAMED);      \
    else if (storing == CACHED)                     \
        walk(sums, from, count, to, CACHED);        \
    else                                            \
        walk(sums, from, count, to, NOWHERE);

FOR_AVX2
static void add_avx2(struct sums *sums, const uint8_t *from, int64_t count, uint8_t *to, enum storing storing)
{
    CHOOSE(walk_avx2)
}

FOR_AVX512
static void add_avx512(struct sums *sums, const uint8_t *from, int64_t count, uint8_t *to, enum storing storing)
{
    CHOOSE(walk_avx512)
}
#endif

#ifndef WIDEST_BITS /* so that tests can try all of them on one machine */
#define WIDEST_BITS 512
#endif

static add_stripes *fastest(void)
{
#if defined(__x86_64__)
    if (WIDEST_BITS >= 512 && __builtin_cpu_supports("avx512f"))
        return add_avx512;
    if (WIDEST_BITS >= 256 && __builtin_cpu_supports("avx2"))
        return add_avx2;
#endif
    return add_plainly;
}

static uint64_t merged(const uint64_t lanes[8], uint64_t length)
{
    uint64_t found = length * PRIME64[0];
    for (int lane = 0; lane < 8; lane += 2) {
        const uint8_t *key = KEY + MERGE_KEY + 8 * lane;
        __uint128_t product = (__uint128_t)(lanes[lane] ^ number_at(key)) * (lanes[lane + 1] ^ number_at(key + 8));
        found += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    found ^= found >> 37;
    found *= 0x165667919E3779F9;
    return found ^ found >> 32;
}

/* A member in its file, and where its data go. */
struct member {
    const uint8_t *stored;
    uint8_t *copied;
    int64_t length, data, data_end;
    int streamed;
};

/* Take a stripe that may have data and other bytes in it; copy its data. */
static void take_mixed(const struct member *member, int64_t at, uint8_t stripe[STRIPE])
{
    int64_t low = at > member->data ? at : member->data;
    int64_t high = at + STRIPE < member->data_end ? at + STRIPE : member->data_end;
    take_stripe(stripe, member->stored + at);
    if (low < high)
        memcpy(member->copied + (low - member->data), stripe + (low - at), (size_t)(high - low));
}

/* Copy the data of a member, and return the checksum of all of it. */
static uint64_t copy_and_check(const struct member *member, add_stripes *add)
{
    struct sums sums = {
        {PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2], PRIME64[3], PRIME32[1], PRIME64[4], PRIME32[0]}, 0};
    const int64_t stripes = (member->length - 1) / STRIPE;
    uint8_t stripe[STRIPE];
    while (sums.stripes < stripes) {
        const int64_t at = STRIPE * sums.stripes;
        const int inside = at >= member->data && at < member->data_end;
        int64_t count = stripes - sums.stripes;
        if (at < member->data_end) {
            int64_t whole = ((inside ? member->data_end : member->data) - at) / STRIPE;
            count = whole < count ? whole : count;
        }
        if (!count) { /* a border goes through this one */
            take_mixed(member, at, stripe);
            add(&sums, stripe, 1, NULL, NOWHERE);
        } else if (inside) {
            uint8_t *to = member->copied + (at - member->data);
            add(&sums, member->stored + at, count, to, member->streamed && !((uintptr_t)to % LINE) ? STREAMED : CACHED);
        } else {
            add(&sums, member->stored + at, count, NULL, NOWHERE);
        }
    }
    take_mixed(member, member->length - STRIPE, stripe);
    add_stripe(sums.lanes, stripe, KEY + LAST_KEY);
    return merged(sums.lanes, (uint64_t)member->length);
}

/* -- what Python calls ---------------------------------------------------------------------------------------------- */

/* The parts of items: the same for all, or one for each. */
struct parts {
    const struct part *first;
    int64_t count;
    int each;
    int streamed; /* past the caches */
};

static const struct part *parts_of(const struct parts *parts, int64_t item)
{
    return parts->first + (parts->each ? item : 0);
}

static int64_t piece_bytes(const struct parts *parts, int64_t item)
{
    return parts_of(parts, item)[parts->count - 1].end;
}

/* Let the disk bring what is not in memory, for all items at once; page after page, it would take turns with us. */
static void ask_for(int64_t n_items, const struct shard *shards, const int64_t *shard, const int64_t *begin,
                    const struct parts *parts)
{
    for (int64_t item = 0; item < n_items; item++) {
        const int64_t n_bytes = piece_bytes(parts, item);
        int file = (int)shards[shard[item]].file;
        if (file < 0 || n_bytes < ADVISED_BYTES)
            continue;
        uint8_t byte;
        struct iovec place = {&byte, 1};
        if (preadv2(file, &place, 1, begin[item], RWF_NOWAIT) != 1)
            posix_fadvise(file, begin[item], n_bytes, POSIX_FADV_WILLNEED);
    }
}

/* Copy the parts of one item, whose piece begins at `piece`.
 *
 * place: its row in the arrays; with parts of each, the byte where it begins.
 * checks: NULL, or of each part, where its checksums are; `number` is that of the item.
 *
 * Returns the first part whose checksum is another one; -1 where none is.
 */
static int64_t copy_item(const uint8_t *piece, const struct parts *parts, int64_t item, uint8_t *const *target,
                         int64_t place, const uint64_t *const *checks, int64_t number)
{
    add_stripes *add = fastest();
    for (int64_t n = 0; n < parts->count; n++) {
        const struct part *part = parts_of(parts, item) + n;
        uint8_t *copied = target[n] + place * (parts->each ? 1 : part->n_bytes);
        int past = parts->streamed && part->n_bytes >= STREAMED_PART;
        if (checks) {
            int64_t data = part->data - part->begin;
            struct member member = {
                piece + part->begin, copied, part->end - part->begin, data, data + part->n_bytes, past};
            if (copy_and_check(&member, add) != checks[n][number])
                return n;
        } else if (past) {
            stream(copied, piece + part->data, part->n_bytes);
        } else {
            memcpy(copied, piece + part->data, (size_t)part->n_bytes);
        }
    }
    return -1;
}

/* Copy the parts of items into the rows `place` of arrays.
 *
 * shard, begin: of each item, which of `shards` has it, and where it begins there.
 * each: 0, or 1: every item has one part, of its own, and `place` is the byte of the one array where it begins.
 * target: of each part, the array, whose rows have the part's n_bytes.
 * unverified: NULL, or whether each item is to be compared with its checksums, of members of more than 240 bytes.
 * checks: with it, (shards, parts), where the checksums of all items of a shard are.
 * number: with it, the number of each item in its shard.
 *
 * Returns how many items were copied: fewer than n_items where the next one reaches beyond its shard, or cannot be read,
 * and `wrong` is -1; or where its part number `wrong` is not what was written. -1 where faults cannot be caught.
 */
int64_t penstock_copy(int64_t n_items, const struct shard *shards, const int64_t *shard, const int64_t *begin,
                      int64_t n_parts, const struct part *first_part, int64_t each, uint8_t *const *target,
                      const int64_t *place, const uint8_t *unverified, const uint64_t *const *checks,
                      const int64_t *number, int64_t *wrong)
{
    struct reading mine;
    volatile int64_t item = 0;
    struct parts parts = {first_part, n_parts, each != 0, 0};
    if (!each) /* what has a size of its own is decoded right away */
        parts.streamed = n_items * piece_bytes(&parts, 0) >= STREAMED_BATCH;
    *wrong = -1;
    if (!handler_is_set())
        return -1;
    ask_for(n_items, shards, shard, begin, &parts);
    if (!sigsetjmp(mine.escape, 0)) {
        for (; item < n_items && *wrong < 0; item += *wrong < 0) {
            const struct shard *from = shards + shard[item];
            const int64_t n_bytes = piece_bytes(&parts, item);
            if (begin[item] < 0 || begin[item] > from->n_bytes - n_bytes)
                break;
            const uint8_t *piece = from->map + begin[item];
            int compared = unverified && unverified[item];
            mine.low = (uintptr_t)piece;
            mine.high = (uintptr_t)(piece + n_bytes);
            reading = &mine;
            atomic_signal_fence(memory_order_seq_cst); /* nothing is read before the handler knows, or after it forgets */
            *wrong = copy_item(piece, &parts, item, target, place[item],
                               compared ? checks + shard[item] * n_parts : NULL, compared ? number[item] : 0);
            atomic_signal_fence(memory_order_seq_cst);
            reading = NULL;
        }
    }
    reading = NULL;
    stream_ends();
    return item;
}

/* Say of each shard whether its file was written to since. */
void penstock_changed(int64_t n_shards, const struct shard *shards, uint8_t *changed)
{
    for (int64_t n = 0; n < n_shards; n++) {
        struct stat now;
        /* Not the time of the last writing, which a copying program may set back. */
        changed[n] = fstat((int)shards[n].file, &now) || now.st_size != shards[n].n_bytes ||
                     now.st_ctim.tv_sec * 1000000000 + now.st_ctim.tv_nsec != shards[n].changed_ns;
    }
}
