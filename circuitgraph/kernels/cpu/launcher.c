// Runs the parallel loops of a compiled CPU library, in a process that has no TVM runtime. C11, so that gcc alone
// builds it.
//
// TVM's LLVM code calls its runtime through three pointers that libtvm_runtime fills in when it loads a library.
// Here they get strong, statically initialised definitions, which win over the weak ones in the object at link
// time. The library hides them (see build.py), so a libtvm_runtime in the same process cannot overwrite them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

// The ABI of tvm/runtime/c_backend_api.h.
typedef struct {
  void* sync_handle;
  int32_t num_task;
} ParallelGroupEnv;
typedef int (*ParallelLambda)(int task_id, ParallelGroupEnv* env, void* closure);

// A loop is cut into more tasks than threads, and threads take the next one when they are done: a thread that shares
// its core with another process then delays the loop by one task instead of by its whole half. Which thread runs a
// task does not change results.
enum { kTasksPerThread = 6 };

typedef struct {
  ParallelLambda lambda;
  void* closure;
  ParallelGroupEnv env;
  atomic_int next;
  atomic_int failures;
} Job;

static void RunJob(Job* job) {
  for (int task = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed); task < job->env.num_task;
       task = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) {
    if (job->lambda(task, &job->env, job->closure) != 0) {
      atomic_fetch_add_explicit(&job->failures, 1, memory_order_relaxed);
    }
  }
}

static atomic_int requested_threads;  // 0: what the pool itself thinks right
static _Thread_local bool inside_launch;

// torch's own OpenMP runtime, found by name: a second pool would fight with torch's spinning threads for the cores.
typedef struct {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
  int (*max_threads)(void);
} OpenMP;

static OpenMP openmp;
static pthread_once_t openmp_once = PTHREAD_ONCE_INIT;

static void FindOpenMP(void) {
  // POSIX promises that dlsym's pointers may be read as function pointers.
  *(void**)&openmp.parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  *(void**)&openmp.max_threads = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
}

static bool HasOpenMP(void) {
  pthread_once(&openmp_once, FindOpenMP);
  return openmp.parallel && openmp.max_threads;
}

static inline void Pause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  sched_yield();
#endif
}

// The pool used when the process has no OpenMP runtime. Workers spin for a few tens of microseconds between
// launches, then sleep.
typedef struct {
  int workers;  // with the caller
  pid_t owner;
  pthread_mutex_t mutex;
  pthread_cond_t wake;
  _Atomic uint64_t epoch;
  atomic_int pending;
  Job* job;
} Pool;

enum { kSpins = 2000 };

static void* Serve(void* argument) {
  Pool* pool = argument;
  inside_launch = true;
  uint64_t seen = 0;
  while (true) {
    for (int spin = 0; spin < kSpins && atomic_load_explicit(&pool->epoch, memory_order_acquire) == seen; ++spin) Pause();
    if (atomic_load_explicit(&pool->epoch, memory_order_acquire) == seen) {
      pthread_mutex_lock(&pool->mutex);
      while (atomic_load_explicit(&pool->epoch, memory_order_acquire) == seen) {
        pthread_cond_wait(&pool->wake, &pool->mutex);
      }
      pthread_mutex_unlock(&pool->mutex);
    }
    // The next job cannot be posted before this worker has reported, so epochs advance one at a time.
    ++seen;
    RunJob(pool->job);
    atomic_fetch_sub_explicit(&pool->pending, 1, memory_order_release);
  }
  return NULL;
}

// A pool of as many of the wanted threads as the system gives; NULL without memory.
static Pool* MakePool(int threads) {
  Pool* pool = calloc(1, sizeof(Pool));
  if (pool == NULL) return NULL;
  pool->owner = getpid();
  pool->workers = 1;
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->wake, NULL);
  while (pool->workers < threads) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, Serve, pool) != 0) break;
    pthread_detach(thread);
    ++pool->workers;
  }
  return pool;
}

static void RunOnPool(Pool* pool, Job* job) {
  pthread_mutex_lock(&pool->mutex);
  pool->job = job;
  atomic_store_explicit(&pool->pending, pool->workers - 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&pool->epoch, 1, memory_order_release);
  pthread_mutex_unlock(&pool->mutex);
  pthread_cond_broadcast(&pool->wake);
  RunJob(job);
  for (int spin = 0; atomic_load_explicit(&pool->pending, memory_order_acquire) != 0; ++spin) {
    if (spin < kSpins) {
      Pause();
    } else {
      sched_yield();
    }
  }
}

// One launch at a time: a second thread that finds the pool busy runs its own job alone.
static void RunOnOwnPool(Job* job, int threads) {
  static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;
  static Pool* pool = NULL;
  static int wanted = 0;
  if (pthread_mutex_trylock(&busy) != 0) {
    RunJob(job);
    return;
  }
  if (pool == NULL || wanted != threads || pool->owner != getpid()) {
    pool = MakePool(threads);  // a replaced pool sleeps for ever: its detached threads may still read it
    wanted = threads;
  }
  if (pool == NULL) {
    RunJob(job);
  } else {
    RunOnPool(pool, job);
  }
  pthread_mutex_unlock(&busy);
}

static int ThreadCount(void) {
  int requested = atomic_load_explicit(&requested_threads, memory_order_relaxed);
  if (requested) return requested;
  if (HasOpenMP()) return openmp.max_threads();
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return CPU_COUNT(&allowed);
  long processors = sysconf(_SC_NPROCESSORS_ONLN);
  return processors > 1 ? (int)processors : 1;
}

static void OpenMPBody(void* data) {
  inside_launch = true;
  RunJob(data);
  inside_launch = false;
}

static int Launch(ParallelLambda lambda, void* closure, int num_task) {
  const int threads = inside_launch ? 1 : ThreadCount();
  Job job = {.lambda = lambda, .closure = closure};
  job.env.num_task = num_task > 0 ? num_task : threads * (threads > 1 ? kTasksPerThread : 1);
  if (threads == 1) {
    RunJob(&job);
  } else if (HasOpenMP()) {
    openmp.parallel(OpenMPBody, &job, (unsigned)threads, 0);
  } else {
    inside_launch = true;
    RunOnOwnPool(&job, threads);
    inside_launch = false;
  }
  if (atomic_load(&job.failures) == 0) return 0;
  // A failing task left its error on its own thread; the caller reads it on this one.
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", "circuitgraph: a parallel task of this kernel failed");
  return -1;
}

static void* AllocWorkspace(int device_type, int device, uint64_t bytes, int type_code, int type_bits) {
  (void)device_type, (void)device, (void)type_code, (void)type_bits;
  return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static int FreeWorkspace(int device_type, int device, void* memory) {
  (void)device_type, (void)device;
  free(memory);
  return 0;
}

int (*__TVMBackendParallelLaunch)(ParallelLambda, void*, int) = Launch;
void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = AllocWorkspace;
int (*__TVMBackendFreeWorkspace)(int, int, void*) = FreeWorkspace;

// circuitgraph_init(threads: int) -> bool: sets how many threads run a parallel loop (0: the pool's own default,
// which under torch is torch.get_num_threads()) and says whether the pool is the process's OpenMP one.
__attribute__((visibility("default"))) int __tvm_ffi_circuitgraph_init(void* self, const TVMFFIAny* args,
                                                                       int32_t num_args, TVMFFIAny* result) {
  (void)self;
  if (num_args != 1 || args[0].type_index != kTVMFFIInt || args[0].v_int64 < 0) {
    TVMFFIErrorSetRaisedFromCStr("TypeError", "circuitgraph_init expects one argument: threads, an int >= 0");
    return -1;
  }
  atomic_store(&requested_threads, (int)args[0].v_int64);
  result->type_index = kTVMFFIBool;
  result->v_int64 = HasOpenMP();
  return 0;
}
