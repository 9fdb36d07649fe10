//! Tests a release without memory with a descriptor, and with other numbers for memory types.

use peerlane_hal::{Fabric as _, PeerMemory as _, Rank, Role};
use peerlane_simulated_driver::in_own_process;

use crate::support::{Allocation, driver_of, pattern, put_and_read, ranks, register, soon};

const RELEASE: &str = "5.7";

#[test]
fn memory_is_exported_by_ipc() {
    in_own_process(|| {
        let (driver, _turn) = driver_of(RELEASE);
        // `strict` accepts IPC handles, because the device reports no descriptors.
        let mut fabrics = ranks(2, true).unwrap();
        let allocation = Allocation::new(1, 4096);
        let theirs = register(&fabrics[1], allocation.address + 96, 1000, Role::Data).unwrap();
        let ours = fabrics[1].memory().allocate(1000, Role::Data).unwrap();
        assert_eq!(driver.calls("hipMemMap"), 0);
        for (seed, region) in [(1, &theirs), (2, &ours)] {
            let key = fabrics[1].memory().export(region).unwrap();
            let remote = fabrics[0].memory().import(Rank(1), &key, soon()).unwrap();
            assert_eq!(put_and_read(&mut fabrics, &remote, region, seed), pattern(seed, 1000));
        }
        // The call would crash for memory that was not mapped.
        assert_eq!(driver.calls("hipMemRetainAllocationHandle"), 0);
    });
}
