//! Tests a release that takes a pointer to a descriptor, while newer ones take the descriptor itself.

use peerlane_hal::{Fabric as _, PeerMemory as _, Rank, RemoteKey as _, Role};
use peerlane_rocm::{Fabric, Key};
use peerlane_simulated_driver::{Other, hear, in_own_process, tell};

use crate::support::{arrivals, await_arrival, contents, driver_of, pattern, put, soon};

const RELEASE: &str = "6.4";

/// Runs in the other process: imports a region and flags, and puts to the region.
#[test]
#[ignore = "started by the other test of this file"]
fn importer() {
    let (driver, _turn) = driver_of(RELEASE);
    let address = hear().expect("an address");
    let mut fabric = Fabric::open(Rank(1), 2, 1).unwrap();
    tell(&fabric.address());
    fabric.connect(Rank(0), &address, soon()).unwrap();
    let key = Key::decode(&hear().expect("a key")).unwrap();
    let before = driver.calls("hipMemImportFromShareableHandle");
    let remote = fabric.memory().import(Rank(0), &key, soon()).unwrap();
    assert_eq!(driver.calls("hipMemImportFromShareableHandle") - before, 1);
    let key = Key::decode(&hear().expect("another key")).unwrap();
    let arrivals = fabric.memory().import(Rank(0), &key, soon()).unwrap();
    put(&mut fabric, &remote, 7, (&arrivals, 1));
    tell(b"done");
}

#[test]
fn descriptors_are_imported_by_pointer() {
    in_own_process(|| {
        let (_driver, _turn) = driver_of(RELEASE);
        let mut fabric = Fabric::open(Rank(0), 2, 0).unwrap();
        let mut other = Other::start("descriptors::importer", &[]);
        other.tell(&fabric.address());
        let address = other.hear();
        fabric.connect(Rank(1), &address, soon()).unwrap();
        let region = fabric.memory().allocate(5000, Role::Data).unwrap();
        let arrivals = arrivals(&fabric);
        for region in [&region, &arrivals] {
            other.tell(&fabric.memory().export(region).unwrap().encode());
        }
        assert_eq!(other.hear_text(), "done");
        await_arrival(&arrivals, 1);
        assert_eq!(contents(&region), pattern(7, 5000));
        other.end();
    });
}
