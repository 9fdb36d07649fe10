//! Ranks of one process, each connected with all.

use peerlane_hal::{Deadline, Fabric, Rank};

/// As many ranks, as `open` opens them; each connects a peer until `deadline`, from when it begins.
pub(crate) fn connected<F: Fabric>(
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
