//! Connects ranks of one process.

use peerlane_hal::{Deadline, Fabric, Rank};

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
