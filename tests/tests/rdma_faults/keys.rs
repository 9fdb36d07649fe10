//! Uses keys and memory that have changed since they were exported.

use peerlane_hal::{
    CopyEngine as _, ErrorKind, Fabric as _, Flag, Op, PeerMemory, Rank, Region, RemoteKey, Role,
};
use peerlane_rdma::Key;
use peerlane_tests::Outcome;

use crate::pair::{announce, ensure, late, pair, put, region, run, wanted};

/// Every bit of a key, one by one: refused, or still the same region.
pub(crate) fn changed() -> Outcome {
    let fabrics = pair(|_| {})?;
    let local = fabrics[1].memory().allocate(4096, Role::Data)?;
    let key = fabrics[1].memory().export(&local)?;
    let bytes = key.encode();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            let Ok(changed) = Key::decode(&changed) else { continue };
            let answer = fabrics[0].memory().import(Rank(1), &changed, late());
            wanted(ErrorKind::InvalidKey, answer.map(drop))
                .map_err(|failure| failure.within(format!("byte {at}, bit {bit}")))?;
        }
    }
    fabrics[0].memory().import(Rank(1), &key, late())?;
    Ok(())
}

/// The owner breaks the rule: the NIC refuses, the origin gets an error, and the target is unharmed.
pub(crate) fn freed() -> Outcome {
    let fabrics = pair(|_| {})?;
    let (freed, remote) = region(&fabrics, 4096, Role::Data)?;
    let (other, alive) = region(&fabrics, 4096, Role::Data)?;
    let source = fabrics[0].memory().allocate(4096, Role::Data)?;
    let mut engine = fabrics[0].engine(Default::default())?;
    drop(freed);
    let text =
        wanted(ErrorKind::InvalidKey, run(&mut engine, &[put(&remote, &source, 4096)]).map(drop))?;
    ensure(text.contains("rank 1") && text.contains("remote key"), text)?;
    // It stays so, and another engine works.
    wanted(ErrorKind::InvalidKey, engine.completed().map(drop))?;
    drop(engine);
    let mut engine = fabrics[0].engine(Default::default())?;
    // SAFETY: the region lives, and nothing is under way.
    unsafe { source.base().write_bytes(7, 4096) };
    run(&mut engine, &[put(&alive, &source, 4096)])?;
    announce(&fabrics, &mut engine)?;
    // SAFETY: the signal behind the put has come.
    let seen = unsafe { std::slice::from_raw_parts(other.base().as_ptr(), 4096) };
    ensure(seen.iter().all(|byte| *byte == 7), "the bytes of the other region are wrong")?;
    // A flag of a freed region is dropped on the other side.
    let (freed, remote) = region(&fabrics, 64, Role::Flags)?;
    drop(freed);
    let flag = Flag { region: &remote, word: 1 };
    run(&mut engine, &[Op::Signal { flag, value: 1 }])?;
    Ok(())
}
