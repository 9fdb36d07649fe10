//! Tests imports between processes on the simulated driver.

use std::time::Duration;

use peerlane_cuda::{Engine, Fabric, Key, Local, Remote};
use peerlane_hal::{
    At, CopyEngine as _, Deadline, Error as _, ErrorKind, Fabric as _, Op, PeerMemory as _, Rank,
    Region as _, RemoteKey as _, Role,
};
use peerlane_host as host;
use peerlane_simulated_driver::{Other, hear, tell};

use crate::support::{
    Allocation, Segments, announce, arrivals, await_arrival, driver, pattern, pointer, soon,
};

const OWNER: Rank = Rank(0);
const IMPORTER: Rank = Rank(1);

/// Two connected processes: this one owns the memory, the other puts to it.
struct Pair {
    fabric: Fabric,
    other: Other,
    /// Counts the puts that have arrived.
    arrivals: Local,
    puts: u64,
}

impl Pair {
    fn open() -> Self {
        let mut fabric = Fabric::open(OWNER, 2, 0).unwrap();
        let mut other = Other::start("processes::importer", &[]);
        other.tell(&fabric.address());
        let address = other.hear();
        fabric.connect(IMPORTER, &address, soon()).unwrap();
        // Both connect at the same time; a failure that a test injects later must not hit that.
        assert_eq!(other.hear_text(), "connected");
        let arrivals = arrivals(&fabric);
        other.tell(&fabric.memory().export(&arrivals).unwrap().encode());
        assert_eq!(other.hear_text(), "ready");
        Self { fabric, other, arrivals, puts: 0 }
    }

    /// Lets the other process import the region. Returns how many imports its driver holds, or the error.
    fn import(&mut self, key: &Key) -> Result<u8, String> {
        self.other.tell(&[b"import".as_slice(), &key.encode()].concat());
        match self.other.hear_text() {
            text if text.starts_with("open ") => Ok(text[5..].parse().expect("a number")),
            text => Err(text),
        }
    }

    /// Lets the other process fill the region that it imported last, and checks the contents.
    fn check(&mut self, seed: u8, region: &Local) {
        self.other.tell(&[b"put___".as_slice(), &[seed]].concat());
        assert_eq!(self.other.hear_text(), "done");
        self.puts += 1;
        await_arrival(&self.arrivals, self.puts);
        let mut seen = vec![0; region.bytes() as usize];
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { region.download(0, &mut seen) }.unwrap();
        assert_eq!(seen, pattern(seed, seen.len()));
    }

    fn drop_imports(&mut self) -> String {
        self.other.tell(b"drop__");
        self.other.hear_text()
    }

    fn key(&self, region: &Local) -> Key {
        self.fabric.memory().export(region).unwrap()
    }

    fn register(&self, address: u64, bytes: u64) -> Local {
        // SAFETY: every test keeps the memory until the other process has dropped its imports.
        unsafe { self.fabric.memory().register(pointer(address), bytes, Role::Data) }.unwrap()
    }
}

/// The other process: executes the commands that it receives.
#[test]
#[ignore = "started by the other tests of this file"]
fn importer() {
    let (driver, _turn) = driver();
    let address = hear().expect("an address");
    let mut fabric = Fabric::open(IMPORTER, 2, 1).unwrap();
    tell(&fabric.address());
    fabric.connect(OWNER, &address, soon()).unwrap();
    tell(b"connected");
    let Some(key) = hear() else { return };
    let arrivals = fabric.memory().import(OWNER, &Key::decode(&key).unwrap(), soon()).unwrap();
    tell(b"ready");
    let mut puts = 0;
    let at_first = driver.counter("open_imports", None);
    let mut engine = fabric.engine(Default::default()).unwrap();
    let mut imports: Vec<(Remote, u64)> = Vec::new();
    while let Some(line) = hear() {
        let (word, rest) = line.split_at(6);
        let answer = match word {
            b"import" => {
                let key = Key::decode(rest).unwrap();
                match fabric.memory().import(OWNER, &key, soon()) {
                    Ok(remote) => {
                        imports.push((remote, key.region_bytes()));
                        format!("open {}", driver.counter("open_imports", None) - at_first)
                    }
                    Err(error) => format!("{}: {error}", error.kind()),
                }
            }
            b"drop__" => {
                imports.clear();
                format!("open {}", driver.counter("open_imports", None) - at_first)
            }
            b"put___" => {
                let (remote, bytes) = imports.last().expect("an import");
                puts += 1;
                put(&fabric, &mut engine, (remote, *bytes), rest[0], announce(&arrivals, puts));
                "done".to_owned()
            }
            word => panic!("{word:?}"),
        };
        tell(answer.as_bytes());
    }
}

fn put(
    fabric: &Fabric,
    engine: &mut Engine,
    (remote, bytes): (&Remote, u64),
    seed: u8,
    announcement: Op<'_, Local, Remote>,
) {
    let source = fabric.memory().allocate(bytes, Role::Data).unwrap();
    // SAFETY: nobody else accesses these bytes of the region now.
    unsafe { source.upload(0, &pattern(seed, bytes as usize)) }.unwrap();
    let (dst, src) = (At { region: remote, offset: 0 }, At { region: &source, offset: 0 });
    let ops = [Op::Put { dst, src, bytes }, announcement];
    // SAFETY: all of it lives until the ticket is complete, and no other code accesses it.
    let ticket = unsafe { engine.submit(&ops) }.unwrap();
    let deadline = Deadline::after(Duration::from_secs(20));
    while engine.completed().unwrap() < ticket {
        assert!(!deadline.has_passed(), "the put is not complete");
        std::thread::yield_now();
    }
}

#[test]
fn memory_that_peerlane_allocates() {
    let (_driver, _turn) = driver();
    let mut pair = Pair::open();
    let region = pair.fabric.memory().allocate(100_001, Role::Data).unwrap();
    let key = pair.key(&region);
    pair.import(&key).unwrap();
    pair.check(1, &region);
    pair.drop_imports();
    drop(region);
    let error = pair.import(&key).unwrap_err();
    assert!(
        error.starts_with("invalid key: ") && error.contains("has freed the memory ("),
        "{error}"
    );
    pair.other.end();
}

#[test]
fn two_regions_of_one_allocation_are_opened_once() {
    let (_driver, _turn) = driver();
    let mut pair = Pair::open();
    let allocation = Allocation::new(0, 10_000);
    let (first, second) =
        (pair.register(allocation.address + 1, 999), pair.register(allocation.address + 5000, 777));
    assert_eq!(pair.import(&pair.key(&first)), Ok(1));
    pair.check(1, &first);
    assert_eq!(pair.import(&pair.key(&second)), Ok(1));
    pair.check(2, &second);
    assert_eq!(pair.import(&pair.key(&second)), Ok(1));
    assert_eq!(pair.drop_imports(), "open 0");
    // Freed memory is refused even if its handle can still be opened.
    let key = pair.key(&first);
    drop(first);
    let error = pair.import(&key).unwrap_err();
    assert!(error.starts_with("invalid key: "), "{error}");
    pair.other.end();
}

#[test]
fn every_segment_of_mapped_memory() {
    let (_driver, _turn) = driver();
    let mut pair = Pair::open();
    let segments = Segments::new(0, 3, true);
    let (start, bytes) =
        (segments.address + segments.segment_bytes - 77, 2 * segments.segment_bytes);
    let region = pair.register(start, bytes);
    pair.import(&pair.key(&region)).unwrap();
    pair.check(3, &region);
    assert_eq!(pair.drop_imports(), "open 0");
    pair.other.end();
}

#[test]
fn memory_that_another_fabric_of_the_process_allocated() {
    let (_driver, _turn) = driver();
    let mut pair = Pair::open();
    let another = Fabric::open(OWNER, 1, 0).unwrap();
    for (role, head) in [(Role::Data, 0), (Role::Data, 4097), (Role::Flags, 0), (Role::Flags, 808)]
    {
        let region = another.memory().allocate(50_000, role).unwrap();
        let base = pointer(region.device_ptr() + head);
        // SAFETY: inside the region, which outlives the imports.
        let part = unsafe { pair.fabric.memory().register(base, 40_000, role) }.unwrap();
        pair.import(&pair.key(&part)).unwrap();
        pair.check(5, &part);
        let mut before = vec![1; head as usize];
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { region.download(0, &mut before) }.unwrap();
        assert!(before.iter().all(|byte| *byte == 0));
        pair.drop_imports();
    }
    pair.other.end();
}

#[test]
fn host_memory_that_another_fabric_of_the_process_allocated() {
    let (_driver, _turn) = driver();
    let mut pair = Pair::open();
    let host = host::Fabric::open(OWNER, 1).unwrap();
    for (role, head) in [(Role::Data, 0), (Role::Data, 4097), (Role::Flags, 0), (Role::Flags, 808)]
    {
        let region = host.memory().allocate(50_000, role).unwrap();
        let base = pointer(region.base().as_ptr() as u64 + head);
        // SAFETY: inside the region, which outlives the imports.
        let part = unsafe { pair.fabric.memory().register(base, 40_000, role) }.unwrap();
        pair.import(&pair.key(&part)).unwrap();
        pair.check(5, &part);
        // SAFETY: the first byte of the completed put; no later op writes it.
        let seen = unsafe { base.read() };
        assert_eq!(seen, pattern(5, 1)[0]);
        pair.drop_imports();
    }
    // The caller's own host memory can be used only by ranks of this process.
    let words = [0_u64; 8];
    // SAFETY: the words outlive the registration, and no op accesses them.
    let flags =
        unsafe { pair.fabric.memory().register(pointer(words.as_ptr() as u64), 64, Role::Flags) };
    let error = pair.import(&pair.key(&flags.unwrap())).unwrap_err();
    assert!(error.contains("the owner registered host memory of its own"), "{error}");
    pair.other.end();
}

#[test]
fn memory_without_a_handle_is_refused_with_advice() {
    let (_driver, _turn) = driver();
    let mut pair = Pair::open();
    let segments = Segments::new(0, 1, false);
    let region = pair.register(segments.address, 100);
    let error = pair.import(&pair.key(&region)).unwrap_err();
    assert!(
        error.starts_with(
            "invalid argument: memory of rank 0 cannot be imported: the memory was mapped"
        ) && error.contains("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"),
        "{error}"
    );
    pair.other.end();
}

#[test]
fn a_failed_export_is_reported_to_the_importer() {
    let (driver, _turn) = driver();
    let mut pair = Pair::open();
    let region = pair.fabric.memory().allocate(64, Role::Data).unwrap();
    let key = pair.key(&region);
    driver.fail("cuMemExportToShareableHandle", 0, 999);
    let error = pair.import(&key).unwrap_err();
    let start = "other: rank 0 failed to share its memory: cuMemExportToShareableHandle failed on device 0 (";
    assert!(error.starts_with(start), "{error}");
    pair.import(&key).unwrap();
    pair.other.end();
}

#[test]
fn a_killed_peer_is_reported_and_the_context_survives() {
    let (_driver, _turn) = driver();
    let mut pair = Pair::open();
    let address = pair.fabric.address();
    let mut other = Other::start("processes::importer", &[]);
    other.tell(&address);
    let lost = other.hear();
    other.kill();
    let error = pair.fabric.connect(IMPORTER, &lost, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    let region = pair.fabric.memory().allocate(64, Role::Data).unwrap();
    pair.import(&pair.key(&region)).unwrap();
    pair.check(9, &region);
    pair.other.end();
}
