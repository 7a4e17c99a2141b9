/* The measuring loop: calls a compiled model and notes the ticks of each call. No allocation, no system call inside. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <x86intrin.h>

typedef void (*call_t)(void *, const void *const *, void *const *);
typedef void (*prep_t)(void *);
#define OUT __attribute__((visibility("default")))

static inline uint64_t begin(void) {
    unsigned aux;
    uint64_t t = __rdtscp(&aux);
    _mm_lfence();
    return t;
}
static inline uint64_t end(void) {
    unsigned aux;
    uint64_t t = __rdtscp(&aux);
    _mm_lfence();
    return t;
}

/* Ticks a second of the counter, against the monotonic clock over `ms` milliseconds. */
OUT double tick_rate(int ms) {
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    uint64_t t0 = begin();
    double s;
    do {
        clock_gettime(CLOCK_MONOTONIC, &b);
        s = (b.tv_sec - a.tv_sec) + 1e-9 * (b.tv_nsec - a.tv_nsec);
    } while (s < ms * 1e-3);
    return (end() - t0) / s;
}

/* `spoil`: 0 nothing, 1 walk `junk` of `junk_bytes` before each call so that no cache holds the model, 2 pause for
 * `junk_bytes` ticks before each call. `prep`: called before the clock starts, if not NULL. Inputs rotate through
 * `rows` rows of `stride` bytes of the first input. */
OUT void measure(call_t call, prep_t prep, void *model, const void *const *in, void *const *out, int inputs,
                 long rows, long stride, int spoil, volatile char *junk, long junk_bytes, long count, uint32_t *ticks) {
    const void *now[64];
    for (int i = 0; i < inputs; i++) now[i] = in[i];
    for (long i = 0; i < count; i++) {
        now[0] = (const char *)in[0] + (i % rows) * stride;
        if (prep) prep(model);
        if (spoil == 1) {
            for (long j = 0; j < junk_bytes; j += 64) junk[j]++;
        } else if (spoil == 2) {
            uint64_t until = __rdtsc() + (uint64_t)junk_bytes;
            while (__rdtsc() < until) _mm_pause();
        } else if (spoil == 3) {
            struct timespec rest = {0, junk_bytes};
            nanosleep(&rest, 0);
        }
        uint64_t a = begin();
        call(model, now, out);
        uint64_t b = end();
        uint64_t d = b - a;
        ticks[i] = d > 0xffffffffu ? 0xffffffffu : (uint32_t)d;
    }
}

static void nothing(void *m, const void *const *in, void *const *out) { (void)m; (void)in; (void)out; }
OUT call_t empty_call(void) { return nothing; }

/* Bytes a second of reading `bytes` again and again (vectors of 64), and multiply-adds a second from registers. */
typedef float V __attribute__((vector_size(64)));
OUT double read_rate(const float *p, long bytes, int turns, double ticks_per_second) {
    V s[8] = {{0}};
    uint64_t a = begin();
    for (int t = 0; t < turns; t++) {
        for (long i = 0; i + 127 < bytes / 4; i += 128)
            for (int k = 0; k < 8; k++) s[k] += *(const V *)(p + i + k * 16);
        __asm__ volatile("" ::: "memory");
    }
    uint64_t b = end();
    volatile float sink = 0;
    for (int k = 0; k < 8; k++) sink += s[k][0];
    return (double)bytes * turns / ((b - a) / ticks_per_second);
}
OUT double multiply_rate(int turns, double ticks_per_second) {
    V s[12];
    for (int k = 0; k < 12; k++) s[k] = (V){1.0f};
    V x = {0.5f};
    uint64_t a = begin();
    for (int t = 0; t < turns; t++) {
        for (int k = 0; k < 12; k++) s[k] = s[k] * x + x;
        __asm__ volatile("" : "+x"(x));
    }
    uint64_t b = end();
    volatile float sink = 0;
    for (int k = 0; k < 12; k++) sink += s[k][0];
    return 12.0 * 16 * turns / ((b - a) / ticks_per_second);
}
