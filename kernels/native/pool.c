/* Threads that run lists of ops together: `motet_run`.
 *
 * The caller is one of the threads. Ops that may run side by side are a stage; a stage's tasks are claimed one by one,
 * and who ends the last one opens the next stage. So a stage waits for its tasks, not for the threads: one that another
 * process keeps from its core between two tasks holds up nobody, and finds its way into whatever stage is open then.
 *
 * A thread without a task spins first, since a stage is over soonest that way, then sleeps, so that the core is free for
 * the thread that it waits for: there may be none other. How long it spins follows from what waiting lately took.
 * Where the kernel was seen to take the core away, a thread offers it between two tasks before that happens again, since
 * in the middle of a task all others would have to wait for it.
 */

#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

#include "numbers.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Nanoseconds. Waking a sleeping thread takes 5000 to 50000. */
enum { SPIN_LEAST = 2000, SPIN_MOST = 200000, SPIN_CHECK = 32 };

/* Nanoseconds. A kernel that ticks 250 times a second takes a shared core away every 4 ms, and gives half of the time to
 * who offers it after 2 ms: measured with Linux 6.18; after 1 ms a quarter, after 3 ms three eighths. */
enum { OFFER_AFTER = 2400000, LOOK_EVERY = 500000, SHARED_FOR = 100000000, TAKEN = 100000 };

/* Which task is next: a stage's number, counted over all runs, above the number of the task. Between runs the task is
 * NO_TASK, which no stage has: a thread that is late may see one run's stages and another's numbers, and must not claim. */
enum { TASK_BITS = 24 };
#define TASK_MASK ((1ULL << TASK_BITS) - 1)
#define NO_TASK TASK_MASK

typedef struct {
    _Alignas(LINE) int64_t first_op, end_op;
    atomic_llong num_tasks;
    _Alignas(LINE) atomic_llong num_done;
} Stage;

typedef struct Pool {
    int64_t num_threads;
    /* The run in hand, read by who has claimed a task of it. */
    const Op *ops;
    const Step *step;
    int64_t *times;
    int64_t *num_tasks; /* of each op */
    int64_t room, num_ops;
    /* The same, also read before a claim, perhaps of another run: then the claim fails. */
    _Atomic(Stage *) stages;
    atomic_llong num_stages;
    atomic_ullong first_stage; /* its number */
    int64_t began_ns;
    char **scratch;       /* of each thread */
    int64_t scratch_bytes;
    _Alignas(LINE) atomic_ullong next;
    _Alignas(LINE) atomic_uint phase; /* counts up whenever a stage opens or a run ends */
    atomic_uint num_asleep;
} Pool;

/* One thread's own. */
typedef struct {
    Pool *pool;
    int64_t index;
    int64_t spin_ns;       /* its patience */
    int64_t resumed_ns;    /* since when it has had its core */
    int64_t looked_ns;     /* when it last read the kernel's count */
    int64_t is_shared_until_ns;
    long num_taken; /* how often the kernel took the core */
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

static long times_taken(void) {
#ifdef RUSAGE_THREAD
    struct rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) == 0) return usage.ru_nivcsw;
#endif
    return 0;
}

/* Returns when the phase is no longer `phase`. */
static void wait_for_change(Member *member, unsigned phase) {
    Pool *pool = member->pool;
    const int64_t begin = now_ns();
    for (;;) {
        for (int turn = 0; turn < SPIN_CHECK; turn++) {
            if (atomic_load_explicit(&pool->phase, memory_order_acquire) != phase) {
                if (member->spin_ns < SPIN_MOST) member->spin_ns += member->spin_ns / 8;
                return;
            }
            pause_briefly();
        }
        if (now_ns() - begin > member->spin_ns) break;
    }
    if (member->spin_ns > SPIN_LEAST) member->spin_ns /= 2;
    atomic_fetch_add(&pool->num_asleep, 1);
    while (atomic_load(&pool->phase) == phase) sleep_while(&pool->phase, phase);
    atomic_fetch_sub(&pool->num_asleep, 1);
    member->resumed_ns = now_ns();
}

static void change(Pool *pool) {
    atomic_fetch_add(&pool->phase, 1);
    if (atomic_load(&pool->num_asleep)) wake_all(&pool->phase);
}

/* How many threads of this process do work that shall have what the ops leave. The kernel gives one that was offered a
 * core half of it, whatever its priority is. */
static atomic_llong num_humble;

void motet_add_humble(int64_t more) { atomic_fetch_add(&num_humble, more); }

/* Between two tasks: lets another process have the core, if one was seen to want it and the time has come. */
static void offer_core(Member *member) {
    if (atomic_load_explicit(&num_humble, memory_order_relaxed) > 0) return;
    const int64_t now = now_ns();
    if (now - member->looked_ns > LOOK_EVERY) {
        const long taken = times_taken();
        if (taken != member->num_taken) {
            member->is_shared_until_ns = now + SHARED_FOR;
            member->resumed_ns = now;
        }
        member->num_taken = taken;
        member->looked_ns = now;
    }
    if (now < member->is_shared_until_ns && now - member->resumed_ns > OFFER_AFTER) {
        sched_yield();
        member->resumed_ns = now_ns();
        if (member->resumed_ns - now > TAKEN) member->is_shared_until_ns = member->resumed_ns + SHARED_FOR;
        member->num_taken = times_taken(); /* a core that was given counts as well */
    }
}

/* Opens a stage; the one behind the last ends the run. */
static void open_stage(Pool *pool, int64_t stage) {
    const uint64_t first_task = stage < pool->num_stages ? 0 : NO_TASK;
    atomic_store(&pool->next, (pool->first_stage + (uint64_t)stage) << TASK_BITS | first_task);
    change(pool);
}

/* Claims a task of the stage that is open: its number and the stage's, or 0 where no task is left. */
static int claim(Pool *pool, int64_t *stage, int64_t *task) {
    unsigned long long next = atomic_load_explicit(&pool->next, memory_order_acquire);
    for (;;) {
        const uint64_t index = (next >> TASK_BITS) - pool->first_stage;
        if ((next & TASK_MASK) == NO_TASK || index >= (uint64_t)pool->num_stages) return 0;
        Stage *stages = pool->stages;
        if ((int64_t)(next & TASK_MASK) >= stages[index].num_tasks) return 0;
        if (atomic_compare_exchange_weak(&pool->next, &next, next + 1)) {
            *stage = (int64_t)index;
            *task = (int64_t)(next & TASK_MASK);
            return 1;
        }
    }
}

static void run_task(Pool *pool, int64_t index, int64_t stage, int64_t task) {
    int64_t op = pool->stages[stage].first_op;
    while (task >= pool->num_tasks[op]) task -= pool->num_tasks[op++];
    pool->ops[op].kind->run(pool->ops[op].problem, pool->step, task, pool->num_threads, pool->scratch[index]);
    if (pool->times && index == 0) pool->times[2 * op] = now_ns();
}

/* Times of a stage that has ended: it has one op with tasks, and ops without any, which took no time. */
static void tell_times(Pool *pool, const Stage *stage) {
    const int64_t now = now_ns(), before = stage->first_op ? pool->times[2 * stage->first_op - 1] : pool->began_ns;
    int64_t ended = before;
    for (int64_t op = stage->first_op; op < stage->end_op; op++) {
        const int has_tasks = pool->num_tasks[op] > 0;
        if (has_tasks) ended = now;
        /* The caller may have had none of the op's tasks. */
        if (!has_tasks || pool->times[2 * op] < before) pool->times[2 * op] = has_tasks ? before : ended;
        pool->times[2 * op + 1] = ended;
    }
}

/* Takes tasks while there are any, and returns the phase in which there were none. */
static unsigned work(Member *member) {
    Pool *pool = member->pool;
    for (;;) {
        const unsigned phase = atomic_load(&pool->phase);
        int64_t index, task;
        if (!claim(pool, &index, &task)) return phase;
        Stage *stage = &pool->stages[index];
        const int64_t num_tasks = stage->num_tasks; /* once this task counts as done, the run may end and another begin */
        run_task(pool, member->index, index, task);
        if (atomic_fetch_add(&stage->num_done, 1) + 1 == num_tasks) {
            if (pool->times) tell_times(pool, stage);
            open_stage(pool, index + 1);
        }
        offer_core(member);
    }
}

static void *live(void *argument) {
    Member member = *(Member *)argument;
    free(argument);
    for (;;) wait_for_change(&member, work(&member));
    return NULL;
}

/* NULL where the system gives no memory or no threads. A pool lives as long as the process. */
Pool *motet_open(int64_t num_threads) {
    Pool *pool = aligned_alloc(LINE, (sizeof *pool + LINE - 1) / LINE * LINE);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->num_threads = num_threads;
    atomic_store(&pool->next, NO_TASK);
    pool->scratch = calloc((size_t)num_threads, sizeof *pool->scratch);
    if (!pool->scratch) return NULL;
    for (int64_t index = 1; index < num_threads; index++) {
        Member *member = calloc(1, sizeof *member);
        pthread_t thread;
        if (!member) return NULL;
        *member = (Member){.pool = pool, .index = index, .spin_ns = SPIN_MOST};
        if (pthread_create(&thread, NULL, live, member)) return NULL;
        pthread_detach(thread);
    }
    return pool;
}

/* Room for a run. What was there before is not freed: a thread that is late may still look at it. */
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
            free(pool->scratch[index]); /* no task is running */
            pool->scratch[index] = aligned_alloc(4096, (size_t)bytes);
            if (!pool->scratch[index]) {
                pool->scratch_bytes = 0;
                return 0;
            }
        }
        pool->scratch_bytes = bytes;
    }
    if (num_ops > pool->room) {
        const int64_t room = 2 * num_ops;
        Stage *stages = aligned_alloc(LINE, (size_t)room * sizeof *stages);
        int64_t *num_tasks = calloc((size_t)room, sizeof *num_tasks);
        if (!stages || !num_tasks) return 0;
        pool->stages = stages;
        pool->num_tasks = num_tasks;
        pool->room = room;
    }
    return 1;
}

/* Cuts the ops into stages that have tasks. `is_timed`: each op with tasks is a stage. */
static void make_stages(Pool *pool, int is_timed) {
    Stage *stage = pool->stages;
    int64_t begun = 0;
    stage->num_tasks = 0;
    for (int64_t op = 0; op < pool->num_ops; op++) {
        pool->num_tasks[op] = pool->ops[op].kind->num_tasks(pool->ops[op].problem, pool->step, pool->num_threads);
        stage->num_tasks += pool->num_tasks[op];
        const int is_closed = is_timed || !pool->ops[op].is_open, is_last = op + 1 == pool->num_ops;
        if ((is_closed || is_last) && stage->num_tasks) {
            stage->first_op = begun;
            stage->end_op = begun = op + 1;
            atomic_store(&stage->num_done, 0);
            if (!is_last) (++stage)->num_tasks = 0;
            else stage++;
        }
    }
    if (stage > pool->stages && begun < pool->num_ops) stage[-1].end_op = pool->num_ops; /* ops without tasks */
    pool->num_stages = stage - pool->stages;
}

/* Runs the ops in order; 0 where there was no memory, and then nothing ran. One run at a time, of stages with fewer
 * than 2^24 - 1 tasks. `times` is NULL, or takes two monotonic times in nanoseconds for each op, and then no op is open. */
int motet_run(Pool *pool, const Op *ops, int64_t num_ops, const Step *step, int64_t *times) {
    static _Thread_local Member caller = {.spin_ns = SPIN_MOST};
    if (num_ops == 0) return 1;
    const uint64_t first_stage = pool->first_stage + (uint64_t)pool->num_stages + 1;
    if (!make_room(pool, ops, num_ops, step)) return 0;
    pool->num_stages = 0;
    pool->ops = ops;
    pool->num_ops = num_ops;
    pool->step = step;
    pool->times = times;
    pool->first_stage = first_stage;
    make_stages(pool, times != NULL);
    pool->began_ns = now_ns();
    if (times) /* those of a run without any task */
        for (int64_t op = 0; op < num_ops; op++) times[2 * op] = times[2 * op + 1] = pool->num_stages ? 0 : pool->began_ns;
    if (pool->num_stages == 1 && pool->stages->num_tasks == 1) {
        run_task(pool, 0, 0, 0); /* nobody need be woken for one task */
        if (times) tell_times(pool, pool->stages);
        return 1;
    }
    caller.pool = pool;
    caller.index = 0;
    open_stage(pool, 0);
    for (;;) {
        const unsigned phase = work(&caller);
        const uint64_t open = atomic_load(&pool->next) >> TASK_BITS;
        if (open - first_stage >= (uint64_t)pool->num_stages) return 1;
        wait_for_change(&caller, phase);
    }
}

int64_t motet_lanes(void) { return LANES; }
