//! A release that has no memory with a descriptor, and numbers kinds of memory in its own way.
//!
//! A process can load only one release, so this is a program of its own.

mod support;

use peerlane_hal::{Fabric as _, PeerMemory as _, Rank, Role};
use support::{Allocation, driver, pattern, put, ranks, register, seen, soon};

const RELEASE: &str = "5.7";

#[test]
fn memory_goes_by_its_handle() {
    let (driver, _turn) = driver(RELEASE);
    // `strict` takes it: the device does not have the better way.
    let mut fabrics = ranks(2, true).unwrap();
    let allocation = Allocation::new(1, 4096);
    let theirs = register(&fabrics[1], allocation.address + 96, 1000, Role::Data).unwrap();
    let ours = fabrics[1].memory().allocate(1000, Role::Data).unwrap();
    assert_eq!(driver.calls("hipMemMap"), 0);
    for (seed, region) in [(1, &theirs), (2, &ours)] {
        let key = fabrics[1].memory().export(region).unwrap();
        let remote = fabrics[0].memory().import(Rank(1), &key, soon()).unwrap();
        put(&mut fabrics[0], &remote, seed);
        assert_eq!(seen(region), pattern(seed, 1000));
    }
    // It would crash for memory that was not mapped.
    assert_eq!(driver.calls("hipMemRetainAllocationHandle"), 0);
}
