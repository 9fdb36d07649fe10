//! Memory of one process in another, on the simulated driver.

mod support;

use peerlane_hal::{Error as _, Fabric as _, PeerMemory as _, Rank, RemoteKey as _, Role};
use peerlane_rocm::{Fabric, Key, Local};
use peerlane_simulated_driver::{Other, hear, tell};
use support::{Allocation, driver, pattern, put, register, seen, soon};

const OWNER: Rank = Rank(0);
const IMPORTER: Rank = Rank(1);
const RELEASE: &str = "7.2";

/// Both processes; this one owns the memory, and the other one puts to it.
struct Pair {
    fabric: Fabric,
    other: Other,
}

impl Pair {
    fn open() -> Self {
        let mut fabric = Fabric::open(OWNER, 2, 0).unwrap();
        let mut other = Other::start("importer", &[]);
        other.tell(&fabric.address());
        let address = other.hear();
        fabric.connect(IMPORTER, &address, soon()).unwrap();
        assert_eq!(other.hear_text(), "connected");
        Self { fabric, other }
    }

    /// Lets the other process import the region and put to it.
    fn put(&mut self, key: &Key, seed: u8) -> String {
        self.other.tell(&[&[seed], &key.encode()[..]].concat());
        self.other.hear_text()
    }

    fn check(&mut self, region: &Local, seed: u8) {
        let key = self.fabric.memory().export(region).unwrap();
        assert_eq!(self.put(&key, seed), "done");
        let seen = seen(region);
        assert_eq!(seen, pattern(seed, seen.len()));
    }
}

/// The other process: does what it is told.
#[test]
#[ignore = "started by the other tests of this program"]
fn importer() {
    let (driver, _turn) = driver(RELEASE);
    let address = hear().expect("an address");
    let mut fabric = Fabric::open(IMPORTER, 2, 1).unwrap();
    tell(&fabric.address());
    match fabric.connect(OWNER, &address, soon()) {
        Ok(()) => tell(b"connected"),
        Err(error) => {
            tell(format!("{}: {error}", error.kind()).as_bytes());
            // The owner still connects to the memory of this fabric.
            let _ = hear();
            return;
        }
    }
    let at_first = driver.counter("open_imports", None);
    while let Some(line) = hear() {
        let key = Key::decode(&line[1..]).unwrap();
        let imported = fabric.memory().import(OWNER, &key, soon()).map(|remote| {
            // A second import of the same memory opens nothing.
            let again = fabric.memory().import(OWNER, &key, soon()).unwrap();
            let opened = driver.counter("open_imports", None) - at_first;
            assert!(opened <= 1, "{opened} were opened");
            put(&mut fabric, &again, line[0]);
            drop(remote);
        });
        assert_eq!(driver.counter("open_imports", None), at_first, "all are closed");
        match imported {
            Ok(()) => tell(b"done"),
            Err(error) => tell(format!("{}: {error}", error.kind()).as_bytes()),
        }
    }
}

#[test]
fn memory_of_every_kind_is_received_into() {
    let (_driver, _turn) = driver(RELEASE);
    let mut pair = Pair::open();
    let memory = pair.fabric.memory();
    let data = memory.allocate(100_001, Role::Data).unwrap();
    let flags = memory.allocate(4096, Role::Flags).unwrap();
    pair.check(&data, 1);
    pair.check(&flags, 2);
    let allocation = Allocation::new(0, 1 << 20);
    for (seed, (head, bytes)) in [(0, 1 << 20), (1, 7), (4097, 100_000)].into_iter().enumerate() {
        let address = allocation.address + head;
        let region = register(&pair.fabric, address, bytes, Role::Data).unwrap();
        pair.check(&region, 3 + seed as u8);
    }
    pair.other.end();
}

#[test]
fn what_has_no_descriptor_goes_by_its_handle() {
    let (driver, _turn) = driver(RELEASE);
    let mut pair = Pair::open();
    driver.fail_always("hipMemCreate", 0, 801);
    let region = pair.fabric.memory().allocate(5000, Role::Data).unwrap();
    driver.clear();
    pair.check(&region, 1);
    pair.other.end();
}

#[test]
fn a_container_that_refuses_ipc_is_named_with_library_and_version() {
    let (driver, _turn) = driver(RELEASE);
    let mut fabric = Fabric::open(OWNER, 2, 0).unwrap();
    let mut other = Other::start("importer", &[("PEERLANE_SIM_LEGACY_IPC", "refused")]);
    other.tell(&fabric.address());
    let address = other.hear();
    fabric.connect(IMPORTER, &address, soon()).unwrap();
    let text = other.hear_text();
    assert!(text.starts_with("unavailable: cannot reach rank 0 on GPU-"), "{text}");
    assert!(text.contains(": hipIpcOpenMemHandle on device 1 ("), "{text}");
    assert!(text.contains("; HIP 7.2.") && text.contains("libamdhip64.so.7.2."), "{text}");
    assert!(text.contains("shares no memory with other processes here"), "{text}");
    other.end();
    driver.set("LEGACY_IPC", "on");
}

#[test]
fn the_key_of_freed_memory_and_a_killed_owner_are_refused() {
    let (_driver, _turn) = driver(RELEASE);
    let mut pair = Pair::open();
    let region = pair.fabric.memory().allocate(64, Role::Data).unwrap();
    let key = pair.fabric.memory().export(&region).unwrap();
    drop(region);
    let text = pair.put(&key, 0);
    assert!(text.starts_with("invalid key: ") && text.ends_with("has been freed"), "{text}");
    let address = pair.fabric.address();
    drop(pair.fabric);
    pair.other.end();
    let mut late = Fabric::open(IMPORTER, 2, 1).unwrap();
    let error = late.connect(OWNER, &address, soon()).unwrap_err();
    assert!(error.to_string().starts_with("rank 0 is gone: "), "{error}");
}
