// A simulated accelerator for tests: a PrivateUse1 backend whose memory is the host's.
//
// Kernels are the CPU's, run at once on the same memory. The rest behaves as on a GPU, at its least convenient:
//   - host and device tensors do not mix;
//   - a non-blocking copy reads a host tensor late, and writes one only when the host has synchronised;
//   - streams have clocks: an operation that touches memory which another stream still uses raises;
//   - memory is limited and counted, and new or freed memory holds NaN;
//   - every wait of the host for the device is counted under the name of the operation that waited;
//   - a graph records operations without running them, and repeats them on the same addresses, whatever is there.
// Python reaches it through the operators `torch.ops.simulated.*` at the end of this file; `__init__.py` builds it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

using at::IntArrayRef, at::Scalar, at::ScalarType, at::Tensor;

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 8;              // every process sees them all, and uses the one of its local rank
constexpr size_t kRoundedTo = 512;       // bytes, as CUDA's caching allocator
constexpr int64_t kPoison = 0xFF;        // in every byte: NaN in all floating-point types, -1 in the integers
constexpr int64_t kStreamsPerDevice = 1 << 16;

// ---- Time: what has run before what ----
//
// Operations of a stream are numbered. A stream's clock says which operations of all streams come before its next one;
// waiting for an event takes over the clock that it recorded. A race is a use of memory that the user's clock lacks.

using Stream = int64_t;                    // device * kStreamsPerDevice + number of the stream on it
using Clock = std::map<Stream, int64_t>;   // of each stream, the number of the last operation known to be complete

void advance(Clock& clock, const Clock& other) {
  for (auto [stream, operation] : other) clock[stream] = std::max(clock[stream], operation);
}

bool includes(const Clock& clock, Stream stream, int64_t operation) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= operation;
}

bool includes(const Clock& clock, const Clock& other) {
  for (auto [stream, operation] : other)
    if (!includes(clock, stream, operation)) return false;
  return true;
}

struct Use {                              // of a part of a block: bytes begin to end, by one operation
  Stream stream;
  int64_t operation;
  int64_t begin, end;
  bool writes;
};

struct Pool;

struct Block {
  char* data;
  size_t bytes;
  int device;
  Stream stream;                          // current when it was allocated: a freed block is at its disposal at once
  at::Storage owner;                      // the host's storage that a kernel has returned; else `data` is ours to free
  std::vector<Use> uses;                  // those that no later one stands for
  std::set<Stream> recorded;              // Tensor.record_stream
  std::shared_ptr<Pool> pool;             // of graphs: gets the memory back
  int64_t number = 0;                     // no other block has had it
};

struct PendingCopy {
  Stream stream;
  int64_t operation;
  Tensor source, target;                  // host tensors; to the host, the source is a snapshot
  bool to_host;
};

struct Event {
  Clock clock;
  int64_t queries;                        // that still answer "not yet"
  std::chrono::steady_clock::time_point time;
  bool captured = false;                  // recorded on a stream whose operations a graph records
};

// Memory of graphs that are repeated one after the other. A capture uses again what was freed, in it or before it.
struct Pool {
  std::multimap<std::pair<Stream, size_t>, char*> free;
  std::vector<std::pair<char*, size_t>> all;
  size_t bytes = 0;
  int device = 0;
  Block whole{};                          // stands for all of it: two of its graphs do not run at the same time
  ~Pool();
};

struct Node {
  std::function<void()> run;
  int64_t foreign = -1;                   // of what Python runs in its place
};

struct Graph {
  std::shared_ptr<Pool> pool;
  std::vector<Node> nodes;
  std::map<std::tuple<char*, int64_t, int64_t, int64_t, bool>, size_t> uses;  // of blocks, numbered; their bytes
  // While it is captured:
  Stream origin = 0;
  Clock before;
  std::set<Stream> streams;
  std::set<int64_t> own;                  // blocks allocated meanwhile
  std::vector<std::pair<char*, size_t>> taken;
  std::map<char*, std::string> overwritten;  // of other blocks: nothing runs, so they get it back
};

std::recursive_mutex mutex;               // see Lock
std::map<Stream, Clock> streams;          // what the next operation of a stream comes after
std::map<Stream, int64_t> stream_queries; // of a stream, that have answered "not yet" since its last operation
Clock host;                               // what the host knows to be complete
auto& pending = *new std::vector<PendingCopy>;  // never destroyed: its tensors would be freed after the rest
std::map<const char*, Block*> blocks;     // by address
struct LastUse { Stream stream; int64_t operation; size_t bytes; };
std::map<Stream, std::vector<LastUse>> freed;  // of blocks that the next operation of a stream may reuse
std::map<std::string, int64_t> counts;    // host synchronisations, by the operation that waited
int64_t launches = 0;                     // operations that are more than a view
const int64_t query_delay = 2;            // calls of `query` that answer "not yet" before an event or a stream is complete
int64_t streams_created = 0;
bool refuses_syncs = false;
int64_t blocks_made = 0;
std::map<int64_t, std::weak_ptr<Pool>> pools;  // each lives as long as a graph or a block of it
auto& graphs = *new std::map<int64_t, std::shared_ptr<Graph>>;
std::shared_ptr<Graph> captured;          // the graph that is being captured
thread_local bool captures_here = false;  // this thread has begun it

// Within the lock nothing may take Python's, whose holder may wait for this one (it frees memory, records an event). The
// second reference to a tensor of Python's takes it, and so does going back to one: a copy that has landed frees its
// tensors behind the lock, and who takes the lock holds a reference before.
auto& landed = *new std::vector<PendingCopy>;
int64_t locks = 0;                        // of the thread that holds the mutex

class Lock {
 public:
  Lock() {
    mutex.lock();
    ++locks;
  }
  ~Lock() {
    std::vector<PendingCopy> done;
    if (--locks == 0) done.swap(landed);
    mutex.unlock();
  }
};

thread_local int current_device = 0;
thread_local int64_t current_streams[kDevices] = {};

Stream key_of(c10::Stream stream) { return stream.device_index() * kStreamsPerDevice + stream.id(); }
Stream current_stream() { return current_device * kStreamsPerDevice + current_streams[current_device]; }

std::string name_of(Stream stream) {
  return c10::str("stream ", stream % kStreamsPerDevice, " of device ", stream / kStreamsPerDevice);
}

bool is_captured(Stream stream) { return captured && captured->streams.count(stream) > 0; }

// What a thread must not do while it captures, or on a stream that is captured.
void refuse_in_capture(const std::string& name) {
  TORCH_CHECK(
      !captured || !(captures_here || is_captured(current_stream())), name,
      ": operation not permitted when stream is capturing");
}

// The stream may reuse blocks that were freed: their other users must come before its next operation.
void check_reuse(Stream stream) {
  for (auto use : std::exchange(freed[stream], {}))
    TORCH_CHECK(
        includes(streams[stream], use.stream, use.operation), "race: a block of ", use.bytes,
        " bytes was freed, to be reused by ", name_of(stream), ", while ", name_of(use.stream),
        " still needs it; call record_stream");
}

// Run the copies that are ordered before `clock`: those to the device, and what they read; all if the host has waited.
void land(const Clock& clock, bool host_waited) {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  auto copies = std::exchange(pending, {});
  auto is_read = [&](const PendingCopy& copy) {
    return std::any_of(copies.begin(), copies.end(), [&](const PendingCopy& other) {
      return !other.to_host && other.source.storage().is_alias_of(copy.target.storage());
    });
  };
  for (auto& copy : copies) {
    bool lands = includes(clock, copy.stream, copy.operation) && (host_waited || !copy.to_host || is_read(copy));
    if (lands) copy.target.copy_(copy.source);
    (lands ? landed : pending).push_back(copy);
  }
}

void host_knows(const Clock& clock) {
  advance(host, clock);
  land(host, true);
}

// The host waits here until everything before `clock` is complete.
void synchronise(const std::string& name, const Clock& clock) {
  refuse_in_capture(name);
  TORCH_CHECK(!refuses_syncs, name, " waits for the device: a host synchronisation where none is allowed");
  counts[name]++;
  host_knows(clock);
}

// Begin an operation on the current stream.
int64_t launch(Stream stream) {
  auto& clock = streams[stream];
  advance(clock, host);
  check_reuse(stream);
  land(clock, false);
  stream_queries[stream] = 0;
  return ++clock[stream];
}

// Note that the stream's last operation uses a part of a block, after all other uses of that part.
void use(Block& block, Stream stream, int64_t begin, int64_t end, bool writes, const std::string& name) {
  auto& clock = streams[stream];
  if (is_captured(stream)) {
    captured->uses[{block.data, block.number, begin, end, writes}] = block.bytes;
    if (writes && captured->own.count(block.number) == 0 && captured->overwritten.count(block.data) == 0)
      captured->overwritten[block.data] = std::string(block.data, block.bytes);
  }
  for (const auto& other : block.uses) {
    if (other.end <= begin || end <= other.begin || !(writes || other.writes)) continue;
    TORCH_CHECK(
        includes(clock, other.stream, other.operation), "race: ", name, " on ", name_of(stream),
        writes ? " writes" : " reads", " a block of ", block.bytes, " bytes that ", name_of(other.stream), " ",
        other.writes ? "writes" : "reads", ", and does not wait for it");
  }
  std::erase_if(block.uses, [&](const Use& other) {  // whoever waits for this one has waited for those
    bool within = begin <= other.begin && other.end <= end;
    return within && (writes || (other.stream == stream && !other.writes));
  });
  block.uses.push_back({stream, clock[stream], begin, end, writes});
}

// ---- Memory ----

void forget(const Block& block);
size_t rounded(size_t bytes) { return (bytes + kRoundedTo - 1) / kRoundedTo * kRoundedTo; }

void release(void* context) {
  Lock lock;
  auto* block = static_cast<Block*>(context);
  Clock users;
  for (const auto& use : block->uses) advance(users, {{use.stream, use.operation}});
  for (auto stream : block->recorded) {  // it is not reused before these are done
    auto& done = streams[stream];
    for (auto user = users.begin(); user != users.end();)
      user = includes(done, user->first, user->second) ? users.erase(user) : std::next(user);
  }
  for (auto user : users) freed[block->stream].push_back({user.first, user.second, block->bytes});
  std::memset(block->data, kPoison, block->bytes);
  blocks.erase(block->data);
  if (block->pool) block->pool->free.emplace(std::pair(block->stream, rounded(block->bytes)), block->data);
  else if (!block->owner) std::free(block->data);
  forget(*block);
  delete block;
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::CachingDeviceAllocator::DeviceStats stats[kDevices];
  size_t limits[kDevices];

  DeviceAllocator() { std::fill(limits, limits + kDevices, size_t(16) << 30); }

  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes == 0) return {nullptr, nullptr, &release_nothing, c10::Device(kDevice, current_device)};
    {
      Lock lock;
      if (is_captured(current_stream())) return allocate_in_pool(bytes);
    }
    check_limit(bytes);
    TORCH_CHECK(posix_memalign(&data, 64, bytes) == 0, "the host has no ", bytes, " bytes left");
    std::memset(data, kPoison, bytes);
    return adopt(static_cast<char*>(data), bytes, {});
  }

  // Count memory as the device's: from now on `release` frees it.
  c10::DataPtr adopt(char* data, size_t bytes, at::Storage owner) {
    if (owner) check_limit(bytes);
    Lock lock;
    auto* block = new Block{data, bytes, current_device, current_stream(), std::move(owner)};
    block->number = ++blocks_made;
    if (is_captured(block->stream)) {
      block->pool = captured->pool;
      captured->own.insert(block->number);
      captured->taken.emplace_back(data, bytes);
    }
    blocks[data] = block;
    for_each_stat(*block, [&](auto& stat, size_t amount) { stat.increase(amount); });
    return {data, block, &release, c10::Device(kDevice, current_device)};
  }

  // The smallest part that is free and at most twice as large, else new memory.
  c10::DataPtr allocate_in_pool(size_t bytes) {
    auto& pool = *captured->pool;
    size_t wanted = rounded(bytes);
    auto found = pool.free.lower_bound({current_stream(), wanted});
    void* data = nullptr;
    if (found != pool.free.end() && found->first.first == current_stream() && found->first.second <= 2 * wanted) {
      data = found->second;
      pool.free.erase(found);
    } else {
      check_limit(bytes);
      TORCH_CHECK(posix_memalign(&data, 64, wanted) == 0, "the host has no ", bytes, " bytes left");
      pool.all.emplace_back(static_cast<char*>(data), wanted);
      pool.bytes += wanted;
      pool.device = current_device;
      stats[current_device].reserved_bytes[0].increase(wanted);
    }
    std::memset(data, kPoison, bytes);
    return adopt(static_cast<char*>(data), bytes, {});
  }

  template <typename Change>
  void for_each_stat(const Block& block, Change change) {
    auto& of = stats[block.device];
    for (auto* bytes : {&of.allocated_bytes, &of.active_bytes, &of.reserved_bytes, &of.requested_bytes})
      if (!block.pool || bytes != &of.reserved_bytes) change((*bytes)[0], rounded(block.bytes));
    for (auto* number : {&of.allocation, &of.active}) change((*number)[0], 1);
  }

  static void release_nothing(void*) {}

  void check_limit(size_t bytes) {
    Lock lock;
    size_t used = stats[current_device].reserved_bytes[0].current, limit = limits[current_device];
    if (used + rounded(bytes) <= limit) return;
    stats[current_device].num_ooms++;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "Simulated device ", current_device, " is out of memory. Tried to allocate ", bytes,
        " bytes; of its ", limit, " bytes ", limit - used, " are free.");
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock;
    if (data.get_context() != nullptr && data.get() != nullptr)
      static_cast<Block*>(data.get_context())->recorded.insert(key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override { return stats[device]; }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for (auto* stat : {&stats[device].allocated_bytes, &stats[device].reserved_bytes}) (*stat)[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    auto& of = stats[device];
    for (auto* stat : {&of.allocated_bytes, &of.active_bytes, &of.reserved_bytes, &of.requested_bytes})
      (*stat)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {limits[device] - stats[device].reserved_bytes[0].current, limits[device]};
  }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator)

void forget(const Block& block) {
  allocator.for_each_stat(block, [](auto& stat, size_t amount) { stat.decrease(amount); });
}

Pool::~Pool() {
  for (auto [data, size] : all) std::free(data);
  allocator.stats[device].reserved_bytes[0].decrease(bytes);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(bytes, 1)) == 0, "the host has no ", bytes, " bytes left");
    Lock lock;
    ranges_[static_cast<char*>(data)] = bytes;
    return {data, data, &unpin, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool holds(const void* pointer) const {
    Lock lock;
    auto above = ranges_.upper_bound(static_cast<const char*>(pointer));
    if (above == ranges_.begin()) return false;
    auto [begin, bytes] = *std::prev(above);
    return pointer == begin || static_cast<const char*>(pointer) < begin + bytes;
  }
  static void unpin(void* data);

 private:
  std::map<const char*, size_t> ranges_;
};

PinnedAllocator pinned_allocator;

void PinnedAllocator::unpin(void* data) {
  Lock lock;
  pinned_allocator.ranges_.erase(static_cast<char*>(data));
  std::free(data);
}

// ---- Random numbers: the host's generator under the device's name ----

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  at::Generator on_host;
  explicit DeviceGenerator(c10::DeviceIndex device, at::Generator generator = at::detail::createCPUGenerator())
      : GeneratorImpl({kDevice, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), on_host(generator) {}
  void set_current_seed(uint64_t seed) override { on_host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { on_host.set_offset(offset); }
  uint64_t get_offset() const override { return on_host.get_offset(); }
  uint64_t current_seed() const override { return on_host.current_seed(); }
  uint64_t seed() override { return on_host.seed(); }
  void set_state(const c10::TensorImpl& state) override { on_host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_host.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device_.index(), on_host.clone()); }
};

const at::Generator& default_generator(c10::DeviceIndex device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int number = 0; number < kDevices; ++number) made.push_back(at::make_generator<DeviceGenerator>(number));
    return made;
  }();
  return generators[device < 0 ? current_device : device];
}

// ---- Devices, streams and events, as torch.accelerator, torch.Stream and torch.Event ask for them ----

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, static_cast<int>(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? current_device : device);
  }
  bool isPinnedPtr(const void* data) const override { return pinned_allocator.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void* data) const override {
    Lock lock;
    auto above = blocks.upper_bound(static_cast<char*>(data));
    TORCH_CHECK(above != blocks.begin(), "no device memory at this address");
    return {kDevice, static_cast<c10::DeviceIndex>(std::prev(above)->second->device)};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto data = allocator.allocate(bytes);
    if (bytes > 0 && storage.nbytes() > 0) std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream_on(c10::Device device, int64_t number) {
    return c10::Stream(c10::Stream::UNSAFE, device, number);
  }
  static c10::Device here(c10::Device device) {
    return device.has_index() ? device : c10::Device(kDevice, current_device);
  }
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kDevice, static_cast<c10::DeviceIndex>(std::exchange(current_device, static_cast<int>(device.index())))};
  }
  c10::Device getDevice() const override { return {kDevice, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there are ", kDevices, " simulated devices, not ", device.index() + 1);
    if (device.has_index()) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device device) const override {
    return stream_on(here(device), current_streams[here(device).index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_on(here(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock;
    return stream_on(here(device), ++streams_created);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_on(stream.device(), std::exchange(current_streams[stream.device_index()], stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    if (*event == nullptr) *event = new Event;
    auto& clock = streams[key_of(stream)];
    advance(clock, host);
    *static_cast<Event*>(*event) = {
        clock, query_delay, std::chrono::steady_clock::now(), is_captured(key_of(stream))};
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock;
    if (event == nullptr) return;
    advance(streams[key_of(stream)], static_cast<Event*>(event)->clock);
    if (!captured || !static_cast<Event*>(event)->captured) return;
    TORCH_CHECK(stream.id() != 0, "the default stream waits for a captured one: operation would make it captured too");
    captured->streams.insert(key_of(stream));
  }
  bool queryEvent(void* pointer) const override {
    Lock lock;
    auto* event = static_cast<Event*>(pointer);
    if (event == nullptr || includes(host, event->clock)) return true;
    if (event->queries-- > 0) return false;
    host_knows(event->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    Lock lock;
    if (event != nullptr && !includes(host, static_cast<Event*>(event)->clock))
      synchronise("Event.synchronize", static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    auto time_of = [](void* event) { return static_cast<Event*>(event)->time; };
    return std::chrono::duration<double, std::milli>(time_of(end) - time_of(begin)).count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock;
    auto& clock = streams[key_of(stream)];
    if (includes(host, clock)) return true;
    if (stream_queries[key_of(stream)]++ < query_delay) return false;
    host_knows(clock);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock;
    synchronise("Stream.synchronize", streams[key_of(stream)]);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock;
    Clock all;
    for (auto& [stream, clock] : streams)
      if (stream / kStreamsPerDevice == device) advance(all, clock);
    synchronise("synchronize", all);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator.recordStream(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- Tensors ----

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

Block* block_of(const Tensor& tensor) {
  return static_cast<Block*>(tensor.storage().data_ptr().get_context());
}

// The bytes of its storage from the first to the last element count as used.
void touch(const Tensor& tensor, Stream stream, bool writes, const std::string& name) {
  auto* block = block_of(tensor);
  if (block == nullptr || tensor.numel() == 0) return;
  int64_t last = 0, bytes = tensor.element_size(), begin = tensor.storage_offset() * bytes;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  use(*block, stream, begin, begin + (last + 1) * bytes, writes, name);
}

// The same memory as a tensor of the host, which keeps the device's storage alive. Growing, it moves to other memory.
// That of a graph knows an address only, and of the host's tensors what they were: a kernel gets them as arguments.
Tensor host_view(const Tensor& tensor, bool of_graph = false) {
  if (!on_device(tensor)) {
    bool is_argument = of_graph && tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    return is_argument ? tensor.clone() : tensor;
  }
  auto& storage = tensor.storage();
  auto* kept = of_graph ? nullptr : new at::Storage(storage);
  c10::DataPtr data(
      storage.mutable_data(), kept, of_graph ? nullptr : +[](void* s) { delete static_cast<at::Storage*>(s); },
      at::kCPU);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      at::Storage(at::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(at::kCPU), true),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return view;
}

// Make the device's what a kernel has allocated on the host: its memory, without a copy.
c10::DataPtr take_over(const Tensor& result) {
  const auto& storage = result.storage();
  if (storage.nbytes() == 0) return allocator.allocate(0);
  if (is_captured(current_stream())) {
    auto data = allocator.allocate(storage.nbytes());
    std::memcpy(data.get(), storage.data(), storage.nbytes());
    return data;
  }
  return allocator.adopt(static_cast<char*>(storage.mutable_data()), storage.nbytes(), storage);
}

Tensor to_device_tensor(const Tensor& result) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      at::Storage(at::Storage::use_byte_size_t(), result.storage().nbytes(), take_over(result), &allocator, true),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
  return tensor;
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Guard::here(c10::device_or_default(device)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(Guard::here(c10::device_or_default(device)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_storage(
    Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  c10::DeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(
      self, source, offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_to_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  at::Storage nothing(at::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
  return at::native::set_storage_cpu_(self, nothing, 0, {0}, {});
}

// As on other accelerators `module.to(device)` keeps its parameters, and `.data` takes a tensor of another device.
bool has_compatible_shallow_copy_type(const Tensor&, const Tensor&) { return true; }

void record_stream(Tensor& self, c10::Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

// ---- Copies ----

// Fill what a copy has not reached yet, so that reading it too early is seen.
void poison(const Tensor& tensor) {
  if (tensor.is_floating_point()) tensor.fill_(std::numeric_limits<double>::quiet_NaN());
  else tensor.fill_(-1);
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor kept_self = self, result = target;
  Lock lock;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  bool to_host = !on_device(target), from_host = !on_device(self);
  c10::DeviceGuard guard(to_host ? self.device() : target.device());
  auto stream = current_stream();
  if (!to_host && !from_host && self.device() != target.device()) {  // each waits for the other, as on CUDA
    auto other = key_of(Guard().getStream(self.device()));
    advance(streams[stream], streams[other]);
    advance(streams[other], streams[stream]);
  }
  auto operation = launch(stream);
  ++launches;
  if (!from_host) touch(self, stream, false, "copy_");
  if (!to_host) touch(target, stream, true, "copy_");
  auto source = host_view(self), destination = host_view(target);
  if (is_captured(stream)) {
    // Repeated, it would read or write the host's memory when others have it.
    TORCH_CHECK(!to_host && !from_host, "a copy between host and device: operation not permitted when stream is capturing");
    captured->nodes.push_back({[from = host_view(self, true), to = host_view(target, true)] { to.copy_(from); }});
  }
  // From or to memory that is not pinned, the driver waits for the device.
  bool pinned = (from_host && self.is_pinned()) || (to_host && target.is_pinned());
  if (self.numel() == 0 || !(to_host || from_host)) {
    destination.copy_(source);
  } else if (!non_blocking || !pinned) {
    synchronise(to_host ? "copy to the host" : "copy from the host", streams[stream]);
    destination.copy_(source);
  } else if (to_host) {
    pending.push_back({stream, operation, source.to(target.scalar_type(), false, true), destination, true});
    poison(destination);
  } else {
    pending.push_back({stream, operation, source, destination, false});
  }
  return result;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Lock lock;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::DeviceGuard guard(self.device());
  auto stream = current_stream();
  launch(stream);
  touch(self, stream, false, "item");
  synchronise("item", streams[stream]);
  return host_view(self).item();
}

// ---- Every other operator: the CPU's kernel, on the same memory ----

// The size of their result depends on values, which the host must read.
const std::set<std::string> kReadByTheHost{
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal", "aten::bincount",
    "aten::repeat_interleave"};

// These take indices from the host. (`index` gets them, and the places of a mask, by operators that count themselves.)
bool puts_by_index(const std::string& name) {
  return name == "aten::index_put_" || name == "aten::_index_put_impl_" || name == "aten::_unsafe_index_put";
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : schema_(op.schema()),
        name_(schema_.name()),
        stack_(*stack),
        begin_(stack->size() - schema_.arguments().size()) {
    // One value for a mask is filled in, whose size nobody asks for: (self, indices, values, accumulate).
    fills_ = puts_by_index(name_) && stack_[begin_ + 2].toTensor().numel() == 1 && !stack_[begin_ + 3].toBool();
    for (size_t number = 0; number < schema_.arguments().size(); ++number)
      for_each_tensor(stack_[begin_ + number], [&](const Tensor& tensor, bool in_list) { look_at(tensor, in_list); });
    knows_size_ = name_ == "aten::repeat_interleave" && !stack_.back().isNone();  // its last argument
  }

  c10::Device device() const { return device_.value_or(c10::Device(kDevice, current_device)); }

  // Replace the arguments by the host's views of them.
  void to_host(Stream stream) {
    for (size_t number = 0; number < schema_.arguments().size(); ++number) {
      const auto* alias = schema_.arguments()[number].alias_info();
      auto& value = stack_[begin_ + number];
      bool writes = alias != nullptr && alias->isWrite();
      for_each_tensor(value, [&](const Tensor& tensor, bool) {
        if (on_device(tensor)) touch(tensor, stream, writes, name_);
      });
      value = replaced(value, [&](const Tensor& tensor) { return view(tensor); });
      if (value.isGenerator()) value = on_host(value.toGenerator());
      else if (value.isDevice() && value.toDevice().type() == kDevice) value = c10::Device(at::kCPU);
      else if (value.isNone() && takes_generator(number)) value = on_host(default_generator(device().index()));
    }
  }

  // The arguments as a graph keeps them; after `to_host`.
  torch::jit::Stack for_graph() {
    for (auto& [on_host, original] : views_) of_graph_.push_back(host_view(original, true));
    torch::jit::Stack arguments(stack_.begin() + begin_, stack_.end());
    for (auto& value : arguments)
      value = replaced(value, [&](const Tensor& tensor) {
        for (size_t number = 0; number < views_.size(); ++number)
          if (views_[number].first.is_same(tensor)) return of_graph_[number];
        return host_view(tensor, true);
      });
    return arguments;
  }

  // Repeat the call, and bring its new results to where they were; after `to_device`.
  std::function<void()> repeated(const c10::OperatorHandle& op, torch::jit::Stack arguments) const {
    return [op, arguments = std::move(arguments), made = made_, grown = grown_] {
      auto stack = arguments;
      op.callBoxed(&stack);
      for (const auto& [argument, place] : grown) place.copy_(argument);
      size_t number = 0;
      for (const auto& value : stack)
        for_each_tensor(value, [&](const Tensor& result, bool) {
          if (const auto& place = made.at(number++); place.defined()) place.copy_(result);
        });
    };
  }

  // Replace the results by tensors of the device; the memory of new ones becomes the device's.
  void to_device(Stream stream) {
    for (size_t number = 0; number < views_.size(); ++number) {
      auto& [on_host, original] = views_[number];
      bool moves = adopt_new_size(on_host, original);
      if (moves && is_captured(stream)) grown_.emplace_back(of_graph_[number], host_view(original, true));
    }
    begin_ = stack_.size() - schema_.returns().size();
    for (size_t number = 0; number < schema_.returns().size(); ++number) {
      auto& value = stack_[begin_ + number];
      value = replaced(value, [&](const Tensor& result) { return original_of(result, stream); });
    }
  }

  bool is_view() const {
    const auto& returns = schema_.returns();
    return !returns.empty() && returns[0].alias_info() != nullptr && !returns[0].alias_info()->isWrite();
  }

  bool host_reads() const { return (kReadByTheHost.count(name_) > 0 && !knows_size_) || host_reads_; }
  const std::string& name() const { return name_; }

 private:
  void look_at(const Tensor& tensor, bool in_list) {
    if (!tensor.defined()) return;
    bool puts = puts_by_index(name_) && in_list;
    if (on_device(tensor)) {
      TORCH_CHECK(!device_ || *device_ == tensor.device(), mixing(*device_, tensor.device()));
      device_ = tensor.device();
      host_reads_ |= puts && !fills_ && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
    } else if (puts) {
      host_reads_ = true;  // copied to the device first
    } else if ((tensor.dim() > 0 || in_list) && name_ != "aten::index") {
      on_host_ = true;
    }
    TORCH_CHECK(!(device_ && on_host_), mixing(*device_, at::kCPU));
  }

  std::string mixing(c10::Device one, c10::Device other) const {
    return c10::str(
        "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other, ", in ",
        name_);
  }

  template <typename See>
  static void for_each_tensor(const c10::IValue& value, See see) {
    if (value.isTensor()) see(value.toTensor(), false);
    else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) see(tensor, true);
    else if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) if (tensor) see(*tensor, true);
  }

  template <typename Replace>
  static c10::IValue replaced(const c10::IValue& value, Replace replace) {
    if (value.isTensor()) return replace(value.toTensor());
    if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(replace(tensor));
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        tensors.push_back(tensor ? std::optional<Tensor>(replace(*tensor)) : std::nullopt);
      return tensors;
    }
    return value;
  }

  bool takes_generator(size_t number) const {
    return schema_.arguments()[number].name() == "generator";
  }

  static at::Generator on_host(const at::Generator& generator) {
    auto* device = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
    return device == nullptr ? generator : device->on_host;
  }

  Tensor view(const Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    for (auto& [on_host, original] : views_)
      if (original.is_same(tensor)) return on_host;
    views_.emplace_back(host_view(tensor), tensor);
    return views_.back().first;
  }

  // A kernel has resized an output; whether it is in other memory now.
  static bool adopt_new_size(const Tensor& on_host, const Tensor& original) {
    auto* storage = original.storage().unsafeGetStorageImpl();
    bool moves = on_host.storage().data() != storage->data() && on_host.storage().nbytes() > 0;
    if (moves) {
      storage->set_data_ptr_noswap(take_over(on_host));
      storage->set_nbytes(on_host.storage().nbytes());
    }
    if (on_host.sizes() != original.sizes() || on_host.strides() != original.strides())
      original.unsafeGetTensorImpl()->set_sizes_and_strides(
          on_host.sizes(), on_host.strides(), on_host.storage_offset());
    return moves;
  }

  Tensor original_of(const Tensor& result, Stream stream) {
    made_.emplace_back();
    if (!result.defined()) return result;
    for (auto& [on_host, original] : views_) {
      if (on_host.is_same(result)) return original;
      if (result.storage().data() == on_host.storage().data() && result.storage().nbytes() > 0)
        return at::native::as_strided_tensorimpl(original, result.sizes(), result.strides(), result.storage_offset());
    }
    auto made = to_device_tensor(result);
    if (auto* block = block_of(made)) use(*block, stream, 0, block->bytes, true, name_);
    if (is_captured(stream)) made_.back() = host_view(made, true);
    return made;
  }

  const c10::FunctionSchema& schema_;
  std::string name_;
  torch::jit::Stack& stack_;
  size_t begin_;
  std::optional<c10::Device> device_;
  bool on_host_ = false, host_reads_ = false, knows_size_ = false, fills_ = false;
  std::vector<std::pair<Tensor, Tensor>> views_;
  std::vector<Tensor> of_graph_;          // `views_` as a graph keeps them
  std::vector<std::pair<Tensor, Tensor>> grown_;  // an argument of the graph that a kernel moves, and its place
  std::vector<Tensor> made_;              // of each result, the place of one that is new
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, stack);
  c10::DeviceGuard guard(call.device());
  auto stream = current_stream();
  torch::jit::Stack of_graph;
  bool records;
  {
    Lock lock;
    if (call.host_reads()) refuse_in_capture(call.name());
    launch(stream);
    launches += !call.is_view();
    call.to_host(stream);
    records = is_captured(stream) && !call.is_view();
    if (records) of_graph = call.for_graph();
  }
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.callBoxed(stack);
  }
  Lock lock;
  call.to_device(stream);
  if (records) captured->nodes.push_back({call.repeated(op, std::move(of_graph))});
  if (call.host_reads()) synchronise(call.name().substr(6), streams[stream]);
}

// Convolutions reach a device of this kind under names that have no CPU kernel.
Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  torch::jit::Stack stack{input, weight, bias, C10_AS_INTARRAYREF_SLOW(stride), C10_AS_INTARRAYREF_SLOW(padding),
                          C10_AS_INTARRAYREF_SLOW(dilation), transposed, C10_AS_INTARRAYREF_SLOW(output_padding),
                          groups.guard_int(__FILE__, __LINE__)};
  run_on_host(op, &stack);
  return stack[0].toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  auto outputs = weight.size(transposed ? 1 : 0) * (transposed ? groups.guard_int(__FILE__, __LINE__) : 1);
  torch::jit::Stack stack{gradient, input, weight, std::vector<int64_t>{outputs}, C10_AS_INTARRAYREF_SLOW(stride),
                          C10_AS_INTARRAYREF_SLOW(padding), C10_AS_INTARRAYREF_SLOW(dilation), transposed,
                          C10_AS_INTARRAYREF_SLOW(output_padding), groups.guard_int(__FILE__, __LINE__),
                          c10::List<bool>({mask[0], mask[1], mask[2]})};
  run_on_host(op, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_to_nothing);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

// ---- torch.autocast, with the lists that CUDA has ----

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
  KERNEL_PRIVATEUSEONE(stack, promote)
  KERNEL_PRIVATEUSEONE(cat, promote)
}

// ---- What Python asks for ----

c10::Dict<std::string, int64_t> host_synchronisations() {
  Lock lock;
  c10::Dict<std::string, int64_t> copied;
  for (auto& [name, number] : counts) copied.insert(name, number);
  return copied;
}

// A kernel that others run (a collective): begins on the current stream, reads and writes these tensors.
void launch_foreign(const std::string& name, at::TensorList reads, at::TensorList writes) {
  Lock lock;
  auto stream = current_stream();
  launch(stream);
  for (const Tensor& tensor : reads) if (on_device(tensor)) touch(tensor, stream, false, name);
  for (const Tensor& tensor : writes) if (on_device(tensor)) touch(tensor, stream, true, name);
}

// ---- Graphs ----

int64_t new_pool() {
  Lock lock;
  static int64_t number = 0;
  pools[++number];
  return number;
}

void capture_begin(int64_t number, int64_t pool) {
  Lock lock;
  TORCH_CHECK(!captured, "another graph is being captured");
  auto stream = current_stream();
  TORCH_CHECK(stream % kStreamsPerDevice != 0, "graphs must be captured on a stream that is not the default one");
  captured = graphs[number] = std::make_shared<Graph>();
  captured->pool = pools.at(pool).lock();
  if (!captured->pool) pools.at(pool) = captured->pool = std::make_shared<Pool>();
  captured->origin = stream;
  captured->streams = {stream};
  captured->before = streams[stream];
  captures_here = true;
}

void capture_end() {
  Lock lock;
  auto graph = std::exchange(captured, nullptr);
  captures_here = false;
  TORCH_CHECK(graph, "no graph is being captured");
  bool joined = true;
  for (auto stream : graph->streams) {
    auto last = streams[stream][stream];
    joined &= includes(streams[graph->origin], stream, last);
    host[stream] = std::max(host[stream], last);  // nothing has run: nobody needs to wait for it
  }
  for (auto& [data, bytes] : graph->taken) std::memset(data, kPoison, bytes);
  for (auto& [data, bytes] : graph->overwritten)
    if (blocks.count(data)) std::memcpy(data, bytes.data(), bytes.size());
  graph->taken.clear();
  graph->overwritten.clear();
  TORCH_CHECK(joined, "a stream was forked from the one that is captured, and has not joined it");
}

// Run the nodes from `first` on until one that Python has to run: gives its number, or -1 at the end.
std::tuple<int64_t, int64_t> replay(int64_t number, int64_t first) {
  Lock lock;
  refuse_in_capture("replay");
  auto& graph = *graphs.at(number);
  auto stream = current_stream();
  if (first == 0) {
    launch(stream);
    ++launches;
    use(graph.pool->whole, stream, 0, 1, true, "a replay");
    for (auto& [key, bytes] : graph.uses) {
      auto [data, block_number, begin, end, writes] = key;
      auto found = blocks.find(data);
      bool is_there = found != blocks.end() && found->second->number == block_number;
      TORCH_CHECK(
          is_there || graph.own.count(block_number), "a graph ", writes ? "writes" : "reads", " a block of ", bytes,
          " bytes that has been freed since it was captured");
      if (is_there) use(*found->second, stream, begin, end, writes, "a replay");
    }
  }
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t place = first; place < graph.nodes.size(); ++place) {
    if (graph.nodes[place].foreign >= 0) return {place + 1, graph.nodes[place].foreign};
    graph.nodes[place].run();
  }
  return {-1, -1};
}

TORCH_LIBRARY(simulated, m) {
  constexpr auto kAnyDevice = c10::DispatchKey::CompositeImplicitAutograd;
  m.def("host(Tensor(a) tensor, bool of_graph=False) -> Tensor(a)", torch::dispatch(kAnyDevice, &host_view));
  m.def("launch(str name, Tensor[] reads, Tensor[] writes) -> ()", torch::dispatch(kAnyDevice, &launch_foreign));
  m.def("host_synchronisations", &host_synchronisations);
  m.def("new_pool", &new_pool);
  m.def("capture_begin", &capture_begin);
  m.def("capture_end", &capture_end);
  m.def("replay", &replay);
  m.def("delete_graph", [](int64_t number) { Lock lock; graphs.erase(number); });
  m.def("is_capturing", []() -> bool { Lock lock; return is_captured(current_stream()); });
  m.def("record_foreign", [](int64_t number) { Lock lock; captured->nodes.push_back({{}, number}); });
  m.def("launches", []() -> int64_t { Lock lock; return launches; });
  m.def("reset", [] { Lock lock; counts.clear(); freed.clear(); launches = 0; });
  m.def("refuse_host_synchronisations", [](bool refuse) { refuses_syncs = refuse; });
  m.def("set_memory_limit", [](int64_t device, int64_t bytes) { allocator.limits[device] = bytes; });
  m.def("device_count", []() -> int64_t { return kDevices; });
  m.def("default_generator", [](int64_t device) { return default_generator(device); });
  m.def("seed", [](int64_t seed) {
    for (int device = 0; device < kDevices; ++device) at::Generator(default_generator(device)).set_current_seed(seed);
  });
}

}  // namespace
