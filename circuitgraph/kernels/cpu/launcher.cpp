// Runs the parallel loops of a compiled CPU library, in a process that has no TVM runtime.
//
// TVM's LLVM code calls its runtime through three pointers that libtvm_runtime fills in when it loads a library.
// Here they get strong, statically initialised definitions, which win over the weak ones in the object at link
// time. The library hides them (see build.py), so a libtvm_runtime in the same process cannot overwrite them.
#include <dlfcn.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace {

// The ABI of tvm/runtime/c_backend_api.h.
struct ParallelGroupEnv {
  void* sync_handle;
  int32_t num_task;
};
using ParallelLambda = int (*)(int task_id, ParallelGroupEnv* env, void* closure);

// A loop is cut into more tasks than threads, and threads take the next one when they are done: a thread that shares
// its core with another process then delays the loop by one task instead of by its whole half. Which thread runs a
// task does not change results.
constexpr int kTasksPerThread = 6;

struct Job {
  ParallelLambda lambda;
  void* closure;
  ParallelGroupEnv env;
  std::atomic<int> next{0};
  std::atomic<int> failures{0};

  Job(ParallelLambda lambda, void* closure, int tasks) : lambda(lambda), closure(closure), env{nullptr, tasks} {}

  void Run() {
    for (int task = next.fetch_add(1, std::memory_order_relaxed); task < env.num_task;
         task = next.fetch_add(1, std::memory_order_relaxed)) {
      if (lambda(task, &env, closure) != 0) failures.fetch_add(1, std::memory_order_relaxed);
    }
  }
};

std::atomic<int> requested_threads{0};  // 0: what the pool itself thinks right
thread_local bool inside_launch = false;

// torch's own OpenMP runtime, found by name: a second pool would fight with torch's spinning threads for the cores.
struct OpenMP {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
  int (*max_threads)();

  static const OpenMP& Get() {
    static const OpenMP instance = Find();
    return instance;
  }
  bool found() const { return parallel && max_threads; }

 private:
  template <typename Function>
  static Function Symbol(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  }
  static OpenMP Find() {
    return {Symbol<decltype(parallel)>("GOMP_parallel"), Symbol<decltype(max_threads)>("omp_get_max_threads")};
  }
};

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// The pool used when the process has no OpenMP runtime. Workers spin for a few tens of microseconds between
// launches, then sleep.
class Pool {
 public:
  explicit Pool(int workers) : workers_(workers), owner_(getpid()) {
    for (int worker = 1; worker < workers; ++worker) std::thread([this] { Serve(); }).detach();
  }

  int workers() const { return workers_; }
  bool survives_fork() const { return owner_ == getpid(); }

  void Run(Job* job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      pending_.store(workers_ - 1, std::memory_order_relaxed);
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job->Run();
    for (int spin = 0; pending_.load(std::memory_order_acquire) != 0; ++spin) {
      if (spin < kSpins) {
        Pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  static constexpr int kSpins = 2000;

  void Serve() {
    inside_launch = true;
    uint64_t seen = 0;
    while (true) {
      for (int spin = 0; spin < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++spin) Pause();
      if (epoch_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return epoch_.load(std::memory_order_acquire) != seen; });
      }
      // The next job cannot be posted before this worker has reported, so epochs advance one at a time.
      ++seen;
      job_->Run();
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int workers_;
  const pid_t owner_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> epoch_{0};
  std::atomic<int> pending_{0};
  Job* job_ = nullptr;
};

// One launch at a time: a second thread that finds the pool busy runs its own job alone.
void RunOnOwnPool(Job* job, int threads) {
  static std::mutex busy;
  static Pool* pool = nullptr;
  std::unique_lock<std::mutex> lock(busy, std::try_to_lock);
  if (!lock.owns_lock()) return job->Run();
  if (pool == nullptr || pool->workers() != threads || !pool->survives_fork()) {
    pool = new Pool(threads);  // a replaced pool sleeps for ever: its detached threads cannot be joined safely
  }
  pool->Run(job);
}

int ThreadCount() {
  if (int requested = requested_threads.load(std::memory_order_relaxed)) return requested;
  if (OpenMP::Get().found()) return OpenMP::Get().max_threads();
  return std::max(1u, std::thread::hardware_concurrency());
}

int Launch(ParallelLambda lambda, void* closure, int num_task) {
  const int threads = inside_launch ? 1 : ThreadCount();
  Job job(lambda, closure, num_task > 0 ? num_task : threads * (threads > 1 ? kTasksPerThread : 1));
  if (threads == 1) {
    job.Run();
  } else if (OpenMP::Get().found()) {
    auto body = [](void* data) {
      inside_launch = true;
      static_cast<Job*>(data)->Run();
      inside_launch = false;
    };
    OpenMP::Get().parallel(body, &job, threads, 0);
  } else {
    inside_launch = true;
    RunOnOwnPool(&job, threads);
    inside_launch = false;
  }
  if (job.failures.load() == 0) return 0;
  // A failing task left its error on its own thread; the caller reads it on this one.
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", "circuitgraph: a parallel task of this kernel failed");
  return -1;
}

void* AllocWorkspace(int, int, uint64_t bytes, int, int) {
  return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
}

int FreeWorkspace(int, int, void* memory) {
  std::free(memory);
  return 0;
}

}  // namespace

extern "C" {

int (*__TVMBackendParallelLaunch)(ParallelLambda, void*, int) = Launch;
void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = AllocWorkspace;
int (*__TVMBackendFreeWorkspace)(int, int, void*) = FreeWorkspace;

// circuitgraph_init(threads: int) -> bool: sets how many threads run a parallel loop (0: the pool's own default,
// which under torch is torch.get_num_threads()) and says whether the pool is the process's OpenMP one.
__attribute__((visibility("default"))) int __tvm_ffi_circuitgraph_init(void*, const TVMFFIAny* args,
                                                                       int32_t num_args, TVMFFIAny* result) {
  if (num_args != 1 || args[0].type_index != kTVMFFIInt || args[0].v_int64 < 0) {
    TVMFFIErrorSetRaisedFromCStr("TypeError", "circuitgraph_init expects one argument: threads, an int >= 0");
    return -1;
  }
  requested_threads.store(static_cast<int>(args[0].v_int64));
  result->type_index = kTVMFFIBool;
  result->v_int64 = OpenMP::Get().found();
  return 0;
}

}  // extern "C"
