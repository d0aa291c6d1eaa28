/* Threads that run lists of ops together: `motet_run`.
 *
 * The caller is one of the threads. An op's tasks are claimed one by one, so that a thread that another process holds up
 * takes fewer. Between ops all wait for each other, first spinning, since that is over soonest, then asleep, so that
 * the core is free for the thread that is waited for: it may have none. How long a thread spins before it sleeps
 * follows from what waiting lately took.
 */

#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "numbers.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

/* Nanoseconds. Waking a sleeping thread takes 5000 to 50000. */
enum { SPIN_LEAST = 2000, SPIN_MOST = 200000, SPIN_CHECK = 32 };

typedef struct {
    _Alignas(LINE) atomic_llong next_task;
} Claims;

typedef struct Pool {
    int64_t num_threads;
    pthread_t *threads; /* num_threads - 1 */
    atomic_uint job;    /* counts up with every run */
    _Alignas(LINE) atomic_uint arrived;
    _Alignas(LINE) atomic_uint phase; /* counts up when all have arrived */
    atomic_uint num_asleep;           /* on `phase` or `job` */
    atomic_int is_closing;
    /* The run in hand. */
    const Op *ops;
    int64_t num_ops;
    const Step *step;
    int64_t *times;
    Claims *claims;
    int64_t num_claims;
    char **scratch; /* of each thread */
    int64_t scratch_bytes;
    int64_t caller_spin_ns;
} Pool;

typedef struct {
    Pool *pool;
    int64_t index;
} Member;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_while(atomic_uint *word, unsigned value) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    (void)word, (void)value;
    sched_yield();
#endif
}

static void wake_all(atomic_uint *word) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

/* Returns when the word is no longer `value`. *spin_ns is this thread's patience, changed by what is seen. */
static void wait_for_change(Pool *pool, atomic_uint *word, unsigned value, int64_t *spin_ns) {
    const int64_t begin = now_ns();
    for (;;) {
        for (int turn = 0; turn < SPIN_CHECK; turn++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value) {
                if (*spin_ns < SPIN_MOST) *spin_ns += *spin_ns / 8;
                return;
            }
            pause_briefly();
        }
        if (now_ns() - begin > *spin_ns) break;
    }
    if (*spin_ns > SPIN_LEAST) *spin_ns /= 2;
    atomic_fetch_add(&pool->num_asleep, 1);
    while (atomic_load(word) == value) sleep_while(word, value);
    atomic_fetch_sub(&pool->num_asleep, 1);
}

static void change(Pool *pool, atomic_uint *word) {
    atomic_fetch_add(word, 1);
    if (atomic_load(&pool->num_asleep)) wake_all(word);
}

static void wait_for_all(Pool *pool, int64_t *spin_ns) {
    const unsigned phase = atomic_load(&pool->phase);
    if (atomic_fetch_add(&pool->arrived, 1) + 1 == pool->num_threads) {
        atomic_store(&pool->arrived, 0);
        change(pool, &pool->phase);
    } else {
        wait_for_change(pool, &pool->phase, phase, spin_ns);
    }
}

/* One thread's part of a run. times[2 * op] is when thread 0 ended its last task, times[2 * op + 1] when all had. */
static void take_part(Pool *pool, int64_t index, int64_t *spin_ns) {
    /* Copies: after the last wait the caller may begin the next run. */
    const int64_t num_ops = pool->num_ops, num_threads = pool->num_threads;
    const Op *ops = pool->ops;
    const Step *step = pool->step;
    int64_t *times = pool->times;
    for (int64_t op = 0; op < num_ops; op++) {
        const OpKind *kind = ops[op].kind;
        const void *problem = ops[op].problem;
        const int64_t num_tasks = kind->num_tasks(problem, step, num_threads);
        const int is_last = op + 1 == num_ops;
        if (num_tasks > 0) {
            for (;;) {
                const int64_t task = atomic_fetch_add_explicit(&pool->claims[op].next_task, 1, memory_order_relaxed);
                if (task >= num_tasks) break;
                kind->run(problem, step, task, num_threads, pool->scratch[index]);
            }
        }
        if (times && index == 0) times[2 * op] = now_ns();
        if (num_threads > 1 && (is_last || (num_tasks > 0 && (!ops[op].is_open || times))))
            wait_for_all(pool, spin_ns);
        if (times && index == 0) times[2 * op + 1] = now_ns();
    }
}

static void *live(void *argument) {
    Member member = *(Member *)argument;
    free(argument);
    Pool *pool = member.pool;
    int64_t spin_ns = SPIN_MOST;
    for (unsigned job = 0;; job++) {
        wait_for_change(pool, &pool->job, job, &spin_ns);
        if (atomic_load(&pool->is_closing)) return NULL;
        take_part(pool, member.index, &spin_ns);
    }
}

/* NULL where the system gives no memory or no threads. */
Pool *motet_open(int64_t num_threads) {
    Pool *pool = aligned_alloc(LINE, (sizeof *pool + LINE - 1) / LINE * LINE);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->num_threads = num_threads;
    pool->caller_spin_ns = SPIN_MOST;
    pool->threads = calloc((size_t)num_threads, sizeof *pool->threads);
    pool->scratch = calloc((size_t)num_threads, sizeof *pool->scratch);
    if (!pool->threads || !pool->scratch) return NULL;
    for (int64_t index = 1; index < num_threads; index++) {
        Member *member = malloc(sizeof *member);
        if (!member) return NULL;
        *member = (Member){pool, index};
        if (pthread_create(&pool->threads[index - 1], NULL, live, member)) return NULL;
    }
    return pool;
}

static int make_room(Pool *pool, const Op *ops, int64_t num_ops, const Step *step) {
    int64_t needed = LINE;
    for (int64_t op = 0; op < num_ops; op++)
        if (ops[op].kind->scratch_bytes) {
            const int64_t bytes = ops[op].kind->scratch_bytes(ops[op].problem, step);
            if (bytes > needed) needed = bytes;
        }
    if (needed > pool->scratch_bytes) {
        const int64_t bytes = (needed + 4095) / 4096 * 4096;
        for (int64_t index = 0; index < pool->num_threads; index++) {
            free(pool->scratch[index]);
            pool->scratch[index] = aligned_alloc(4096, (size_t)bytes);
            if (!pool->scratch[index]) {
                pool->scratch_bytes = 0;
                return 0;
            }
        }
        pool->scratch_bytes = bytes;
    }
    if (num_ops > pool->num_claims) {
        free(pool->claims);
        pool->claims = aligned_alloc(LINE, (size_t)num_ops * sizeof *pool->claims);
        pool->num_claims = pool->claims ? num_ops : 0;
        if (!pool->claims) return 0;
    }
    memset(pool->claims, 0, (size_t)num_ops * sizeof *pool->claims);
    return 1;
}

/* Runs the ops in order; 0 where there was no memory, and then nothing ran. One run at a time. `times` is NULL, or takes
 * two monotonic times in nanoseconds for each op, and then no op is open. */
int motet_run(Pool *pool, const Op *ops, int64_t num_ops, const Step *step, int64_t *times) {
    if (!make_room(pool, ops, num_ops, step)) return 0;
    pool->ops = ops;
    pool->num_ops = num_ops;
    pool->step = step;
    pool->times = times;
    if (num_ops == 1 && ops->kind->num_tasks(ops->problem, step, pool->num_threads) <= 1) {
        /* Others need not be woken for one task. */
        const int64_t num_threads = pool->num_threads;
        if (ops->kind->num_tasks(ops->problem, step, num_threads))
            ops->kind->run(ops->problem, step, 0, num_threads, pool->scratch[0]);
        if (times) times[0] = times[1] = now_ns();
        return 1;
    }
    change(pool, &pool->job);
    take_part(pool, 0, &pool->caller_spin_ns);
    return 1;
}

int64_t motet_lanes(void) { return LANES; }
