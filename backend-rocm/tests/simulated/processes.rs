//! Tests the import of memory of another process, on the simulated driver.

use peerlane_hal::{Error as _, Fabric as _, PeerMemory as _, Rank, RemoteKey as _, Role};
use peerlane_rocm::{Fabric, Key, Local};
use peerlane_simulated_driver::{Other, hear, tell};

use crate::support::{
    Allocation, arrivals, await_arrival, contents, driver, pattern, put, register, soon,
};

const OWNER: Rank = Rank(0);
const IMPORTER: Rank = Rank(1);

/// The owner of memory in this process, and the process that imports it.
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
        assert_eq!(other.hear_text(), "connected");
        let arrivals = arrivals(&fabric);
        other.tell(&fabric.memory().export(&arrivals).unwrap().encode());
        assert_eq!(other.hear_text(), "ready");
        Self { fabric, other, arrivals, puts: 0 }
    }

    /// Lets the other process import a region and put to it. Returns its answer.
    fn put(&mut self, key: &Key, seed: u8) -> String {
        self.other.tell(&[&[seed], &key.encode()[..]].concat());
        self.other.hear_text()
    }

    fn check(&mut self, region: &Local, seed: u8) {
        let key = self.fabric.memory().export(region).unwrap();
        assert_eq!(self.put(&key, seed), "done");
        self.puts += 1;
        await_arrival(&self.arrivals, self.puts);
        let seen = contents(region);
        assert_eq!(seen, pattern(seed, seen.len()));
    }
}

/// Runs in the other process: imports each region it is sent and puts to it.
#[test]
#[ignore = "started by the other tests of this file"]
fn importer() {
    let (driver, _turn) = driver();
    let address = hear().expect("an address");
    let mut fabric = Fabric::open(IMPORTER, 2, 1).unwrap();
    tell(&fabric.address());
    match fabric.connect(OWNER, &address, soon()) {
        Ok(()) => tell(b"connected"),
        Err(error) => {
            tell(format!("{}: {error}", error.kind()).as_bytes());
            // The owner still imports flags of this fabric.
            let _ = hear();
            return;
        }
    }
    let Some(key) = hear() else { return };
    let arrivals = fabric.memory().import(OWNER, &Key::decode(&key).unwrap(), soon()).unwrap();
    tell(b"ready");
    let mut puts = 0;
    let initially = driver.counter("open_imports", None);
    while let Some(line) = hear() {
        let key = Key::decode(&line[1..]).unwrap();
        let imported = fabric.memory().import(OWNER, &key, soon()).map(|remote| {
            // A second import of the same memory opens nothing.
            let again = fabric.memory().import(OWNER, &key, soon()).unwrap();
            let opened = driver.counter("open_imports", None) - initially;
            assert!(opened <= 1, "{opened} were opened");
            puts += 1;
            put(&mut fabric, &again, line[0], (&arrivals, puts));
            drop(remote);
        });
        assert_eq!(driver.counter("open_imports", None), initially, "all are closed");
        match imported {
            Ok(()) => tell(b"done"),
            Err(error) => tell(format!("{}: {error}", error.kind()).as_bytes()),
        }
    }
}

#[test]
fn a_peer_can_put_into_every_kind_of_memory() {
    let (_driver, _turn) = driver();
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
fn memory_without_a_descriptor_is_exported_by_ipc() {
    let (driver, _turn) = driver();
    let mut pair = Pair::open();
    driver.fail_always("hipMemCreate", 0, 801);
    let region = pair.fabric.memory().allocate(5000, Role::Data).unwrap();
    driver.clear();
    pair.check(&region, 1);
    pair.other.end();
}

#[test]
fn a_failure_of_ipc_names_library_and_version() {
    let (driver, _turn) = driver();
    let mut fabric = Fabric::open(OWNER, 2, 0).unwrap();
    let mut other = Other::start("processes::importer", &[("PEERLANE_SIM_LEGACY_IPC", "refused")]);
    other.tell(&fabric.address());
    let address = other.hear();
    fabric.connect(IMPORTER, &address, soon()).unwrap();
    let text = other.hear_text();
    assert!(text.starts_with("unavailable: cannot access the memory of rank 0 on GPU-"), "{text}");
    assert!(text.contains(": hipIpcOpenMemHandle failed on device 1 ("), "{text}");
    assert!(text.contains("; HIP 7.2.") && text.contains("libamdhip64.so.7.2."), "{text}");
    assert!(text.contains("cannot share memory with other processes"), "{text}");
    other.end();
    driver.set("LEGACY_IPC", "on");
}

#[test]
fn keys_of_freed_memory_and_of_closed_fabrics_are_rejected() {
    let (_driver, _turn) = driver();
    let mut pair = Pair::open();
    let region = pair.fabric.memory().allocate(64, Role::Data).unwrap();
    let key = pair.fabric.memory().export(&region).unwrap();
    drop(region);
    let text = pair.put(&key, 0);
    assert!(text.starts_with("invalid key: ") && text.contains("has freed the memory ("), "{text}");
    let address = pair.fabric.address();
    drop(pair.fabric);
    pair.other.end();
    let mut late = Fabric::open(IMPORTER, 2, 1).unwrap();
    let error = late.connect(OWNER, &address, soon()).unwrap_err();
    assert!(error.to_string().starts_with("connection to rank 0 lost: "), "{error}");
}
