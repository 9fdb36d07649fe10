//! Tests that bytes and flags arrive, with all releases and kinds of engines.

use std::sync::atomic::Ordering;

use peerlane_hal::{
    At, CopyEngine as _, Error as _, ErrorKind, Fabric as _, Flag, LinkKind, Op, Rank, Region as _,
};
use peerlane_rocm::EngineKind;

use crate::ranks::{
    Machine, RELEASE, drive, gather, in_another_process, open, open_ranks, open_ranks_of,
};

#[test]
fn a_gather_arrives_on_every_rank() {
    let mut machine = Machine::new();
    machine.set("JITTER_US", "200", "0");
    for count in 1..=4 {
        for shard in [1, 3, 4097, (1 << 20) + 1] {
            let mut ranks = open_ranks(count, shard);
            for epoch in 1..=3 {
                gather(&mut ranks, epoch).unwrap();
            }
        }
    }
}

#[test]
fn flags_after_gets_arrive_after_their_bytes() {
    let mut machine = Machine::new();
    machine.set("PEER_JITTER_US", "300", "0");
    let mut ranks = open_ranks(3, 10_001);
    gather(&mut ranks, 1).unwrap();
    // Rank 0 gets its shard back from the others, and then signals.
    let ticket = ranks[0].submit(|own| {
        let get = |peer: usize| {
            let (dst, src) = (
                At { region: &own.output, offset: peer as u64 * 10_001 },
                At { region: &own.outputs[peer], offset: 0 },
            );
            Op::Get { dst, src, bytes: 10_001 }
        };
        vec![get(1), own.signal(1, 7), get(2), own.signal(2, 8), own.signal(0, 9)]
    });
    let ticket = ticket.unwrap();
    let (getting, others) = ranks.split_at_mut(1);
    // A completed ticket does not say that the peers see their flags.
    drive(getting, |rank| {
        let is_complete = rank.engine.completed()? >= ticket;
        let flags = [&*rank, &others[0], &others[1]].map(|rank| rank.seen_from(0));
        Ok(is_complete && flags == [9, 7, 8])
    })
    .unwrap();
    let mut seen = vec![0; 2 * 10_001];
    // SAFETY: nobody else accesses these bytes of the region now.
    unsafe { ranks[0].output.download(10_001, &mut seen) }.unwrap();
    let shard = crate::ranks::pattern(10, 10_001);
    assert!(seen[..10_001] == shard && seen[10_001..] == shard);
}

#[test]
fn ranksof_both_kinds_gather_together() {
    let _machine = Machine::new();
    // Flags of the second rank lie on its device; the first rank copies them there.
    let mut ranks = open_ranks_of(&[EngineKind::Sdma, EngineKind::Streams], 5000);
    assert_eq!(ranks[0].engine.kind(), EngineKind::Sdma);
    assert_eq!(ranks[1].engine.kind(), EngineKind::Streams);
    assert!(ranks[0].flags.flags().is_some() && ranks[1].flags.flags().is_none());
    for epoch in 1..=3 {
        let tickets: Vec<_> = ranks
            .iter_mut()
            .map(|rank| {
                rank.fill(epoch);
                let ops = rank.submit(|own| {
                    let mut ops =
                        vec![own.put(0), own.put(1), own.signal(0, epoch), own.signal(1, epoch)];
                    if own.rank == 1 {
                        let wait = |word| {
                            let flag = Flag { region: &own.flags, word };
                            Op::Wait { flag, value: epoch, reset: false }
                        };
                        ops.extend([wait(0), wait(1)]);
                    }
                    ops
                });
                ops.unwrap()
            })
            .collect();
        drive(&mut ranks, |rank| {
            let flags = rank.flags.flags();
            let seen = flags
                .is_none_or(|flags| flags.iter().all(|flag| flag.load(Ordering::Acquire) >= epoch));
            Ok(rank.engine.completed()? >= tickets[rank.rank] && seen)
        })
        .unwrap();
        ranks.iter().for_each(|rank| rank.ensure_gathered(epoch));
    }
}

#[test]
fn devices_without_peer_access_are_staged_on_the_host() {
    let mut machine = Machine::new();
    machine.set("P2P", "off", "on");
    let mut ranks = open_ranks(3, 20_001);
    for epoch in 1..=2 {
        gather(&mut ranks, epoch).unwrap();
    }
    let engines = ranks[0].engine.sdma_engines();
    assert_eq!(engines[1].put, "SDMA 0+1 (preferred)", "these engines serve the host");
}

#[test]
fn streams_are_the_default_if_they_can_wait_for_flags() {
    let machine = Machine::new();
    let ranks = open_ranks_of(&[EngineKind::Auto; 2], 10);
    assert_eq!(ranks[0].engine.kind(), EngineKind::Streams);
    drop((ranks, machine));
    in_another_process("gather::streams_that_cannot_wait", "7.2");
}

/// Runs in a process of its own, because the abilities of streams are tested once per process.
#[test]
#[ignore = "run by streams_are_the_default_if_they_can_wait_for_flags"]
fn streams_that_cannot_wait() {
    let mut machine = Machine::new();
    machine.set("WORDS_64", "off", "on");
    let mut ranks = open_ranks_of(&[EngineKind::Auto; 2], 10_001);
    assert_eq!(ranks[0].engine.kind(), EngineKind::Sdma);
    gather(&mut ranks, 1).unwrap();
}

#[test]
fn links_are_reported_with_their_rates() {
    let mut machine = Machine::new();
    machine.set("HIVE", "2", "16");
    let mut fabrics: Vec<_> =
        Rank::all(3).map(|rank| open(rank, 3, EngineKind::Sdma).unwrap()).collect();
    let addresses: Vec<_> = fabrics.iter().map(|fabric| fabric.address()).collect();
    for (peer, address) in Rank::all(3).zip(&addresses) {
        fabrics[0].connect(peer, address, crate::ranks::soon()).unwrap();
    }
    let link = |peer| {
        let link = fabrics[0].link(Rank(peer)).unwrap();
        (link.kind, link.bytes_per_second)
    };
    assert_eq!(link(0), (LinkKind::Local, None));
    assert_eq!(link(1), (LinkKind::Xgmi, Some(100e9)));
    assert_eq!(link(2), (LinkKind::Pcie, Some(32e9)));
    let near = peerlane_rocm::link(0, 1).unwrap();
    assert_eq!((near.hops, near.weight), (Some(1), Some(15)));
    let far = peerlane_rocm::link(0, 2).unwrap();
    assert!(far.weight > near.weight && far.hops > near.hops, "{far:?}");
    let error = peerlane_rocm::link(0, 99).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

/// Checks the rules that select engines on this release.
#[test]
fn the_selection_of_engines_is_reported() {
    let _machine = Machine::new();
    let mut ranks = open_ranks(3, 100);
    gather(&mut ranks, 1).unwrap();
    let engines = ranks[0].engine.sdma_engines().into_iter();
    let puts: Vec<_> = engines.map(|engines| engines.put).collect();
    let expected = match std::env::var(RELEASE).as_deref() {
        Ok("5.7") => ["SDMA of the runtime's choice"; 3],
        Ok("6.1" | "6.4") => {
            ["SDMA 0+1 (by number)", "SDMA 2+3+4+5 (of those idle)", "SDMA 6+7+8+9 (of those idle)"]
        }
        _ => ["SDMA 0+1 (by number)", "SDMA 2+3 (preferred)", "SDMA 4+5 (preferred)"],
    };
    assert_eq!(puts, expected);
}

#[test]
fn older_releases_gather_too() {
    for release in ["5.7", "6.1", "6.4"] {
        in_another_process("gather::the_selection_of_engines_is_reported", release);
        in_another_process("gather::a_gather_arrives_on_every_rank", release);
    }
}
