//! Connects ranks of one process, and reads their flags.

use std::thread;
use std::time::Duration;

use peerlane_hal::{Deadline, Fabric, Rank, Region};

/// How long a flag is read at most.
const FLAG_TIMEOUT: Duration = Duration::from_secs(20);

/// Opens `count` fabrics with `open` and connects each to all ranks, itself included.
///
/// # Errors
/// Those of `open` and of connecting.
pub fn connected<F: Fabric>(
    count: usize,
    deadline: impl Fn() -> Deadline,
    open: impl FnMut(Rank) -> Result<F, F::Error>,
) -> Result<Vec<F>, F::Error> {
    let mut fabrics = Rank::all(count).map(open).collect::<Result<Vec<_>, _>>()?;
    let addresses: Vec<_> = fabrics.iter().map(F::address).collect();
    for fabric in &mut fabrics {
        for (peer, address) in Rank::all(count).zip(&addresses) {
            fabric.connect(peer, address, deadline())?;
        }
    }
    Ok(fabrics)
}

/// Reads a flag until its device answers, which may be busy at first.
///
/// # Panics
/// If there is no answer within 20 s.
pub fn flag_value(flags: &impl Region, word: u64) -> u64 {
    let deadline = Deadline::after(FLAG_TIMEOUT);
    loop {
        if let Some(value) = flags.flag_value(word) {
            return value;
        }
        assert!(!deadline.has_passed(), "flag {word} is not read");
        thread::yield_now();
    }
}

/// Waits until the first flag has this value.
///
/// # Panics
/// If it does not within 20 s.
pub fn await_arrival(arrivals: &impl Region, value: u64) {
    let deadline = Deadline::after(FLAG_TIMEOUT);
    while arrivals.flag_value(0) != Some(value) {
        assert!(!deadline.has_passed(), "signal {value} has not come");
        thread::yield_now();
    }
}
