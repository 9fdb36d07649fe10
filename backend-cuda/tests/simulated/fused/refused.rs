//! Tests what the compilation of fused starts refuses, and the number of blocks of a device.

use std::sync::Arc;

use peerlane_cuda::{Engine, Error};
use peerlane_hal::{
    At, CopyEngine as _, DType, DynRegion, Error as _, ErrorKind, Fabric as _, Flag, FusedOps, Op,
    Operator, PeerMemory as _, Rank, Reduction, Role,
};

use peerlane_host as host;

use super::world::{Case, Collective, Member, OpOf, engine, fabrics, uncompiled};
use crate::support::driver;

const CASE: Case = Case {
    collective: Collective::GatherTagged,
    ranks: 2,
    bytes: 64,
    blocks: 3,
    base: 0,
    operator: Operator::Sum,
    dtype: DType::U8,
};

/// Compiles ops that are the same in all starts.
fn compile<'a>(
    (engine, flags): (&mut Engine, &'a peerlane_cuda::Local),
    ops: &'a [OpOf<'a>],
    slots: Option<(At<'a, peerlane_cuda::Local>, u64)>,
) -> Result<(), Error> {
    compile_both((engine, flags), [ops, ops], slots, CASE.blocks)
}

fn compile_both<'a>(
    (engine, flags): (&mut Engine, &'a peerlane_cuda::Local),
    ops: [&'a [OpOf<'a>]; 2],
    slots: Option<(At<'a, peerlane_cuda::Local>, u64)>,
    blocks: u32,
) -> Result<(), Error> {
    let counter = Flag { region: flags, word: CASE.counter_word() };
    let ops = FusedOps { ops, slots, counter, blocks, base: 0, digest_bits: 0 };
    engine.fused().unwrap().compile(&ops).map(drop)
}

#[track_caller]
fn refused(result: Result<(), Error>, kind: ErrorKind, part: &str) {
    let error = result.expect_err(part);
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(part), "{error}");
}

#[test]
fn other_ops_than_those_of_launches_are_refused() {
    use ErrorKind::{InvalidArgument, Unavailable};
    let (_driver, _turn) = driver();
    let fabrics = fabrics(2);
    let mut members = uncompiled(&fabrics, CASE);
    let Member { engine, regions, .. } = &mut members[0];

    // SAFETY: nothing is started.
    let started = unsafe { engine.fused().unwrap().start(0, 0) }.map(drop);
    refused(started, InvalidArgument, "expected one below 0");

    let input = |offset| At { region: &regions.input, offset };
    let inbox = |offset| At { region: &regions.inboxes[1], offset };
    let put = |to, from, bytes| Op::Put { dst: inbox(to), src: input(from), bytes };
    let get = [Op::Get { dst: At { region: &regions.inbox, offset: 0 }, src: inbox(0), bytes: 8 }];
    refused(compile((engine, &regions.flags), &get, None), Unavailable, "no launch runs a get");

    // Even and odd starts differ in more than places.
    let (even, odd) = ([put(0, 0, 16)], [put(64, 32, 16)]);
    let signal = |word| {
        let flag = Flag { region: &regions.peers_flags[1], word };
        Op::Signal { flag, value: 1 }
    };
    let both: [[&[OpOf<'_>]; 2]; 3] = [
        [&even, &[]],
        [&even, &[put(0, 0, 8)]],
        [&[put(0, 0, 8), signal(0)], &[signal(0), put(0, 0, 8)]],
    ];
    for ops in both {
        let part = "expected the same ops with other places";
        refused(compile_both((engine, &regions.flags), ops, None, 3), InvalidArgument, part);
    }

    // Three blocks use three words.
    let words = CASE.flag_bytes() / 8;
    let last = [signal(words - 2)];
    refused(compile((engine, &regions.flags), &last, None), InvalidArgument, "signalled flag");
    let flag = Flag { region: &regions.flags, word: u64::MAX };
    let wait = [Op::Wait { flag, value: 1, reset: false }];
    refused(compile((engine, &regions.flags), &wait, None), InvalidArgument, "awaited flag");

    let inbox_bytes = CASE.inbox_bytes();
    let slots = |offset, bytes| Some((At { region: &regions.inbox, offset }, bytes));
    for (offset, bytes) in [(0, inbox_bytes + 1), (16, inbox_bytes), (8, 16), (u64::MAX, 16)] {
        refused(
            compile((engine, &regions.flags), &even, slots(offset, bytes)),
            InvalidArgument,
            "the slots are",
        );
    }
    // The data has room in the region of the peer, but not with its tags.
    for place in [inbox_bytes - 16, 8] {
        let ops = [put(place, 0, 16)];
        refused(
            compile((engine, &regions.flags), &ops, slots(0, inbox_bytes)),
            InvalidArgument,
            "a slot for 16",
        );
    }

    refused(
        compile_both((engine, &regions.flags), [&even, &odd], None, 4),
        InvalidArgument,
        "have 4 blocks",
    );
    compile_both((engine, &regions.flags), [&even, &odd], None, 3).unwrap();
    compile_both((engine, &regions.flags), [&odd, &even], None, 3).expect("a second program");

    let mut plain = fabrics[0].engine(Default::default()).unwrap();
    assert!(plain.fused().is_none(), "an engine of another kind");
}

#[test]
fn a_program_has_one_reduction() {
    let (_driver, _turn) = driver();
    let fabrics = fabrics(2);
    let case = Case { collective: Collective::ReduceDirect, bytes: 64, ..CASE };
    let mut members = uncompiled(&fabrics, case);
    let Member { engine, regions, .. } = &mut members[0];

    let at = |offset| At { region: &regions.inbox, offset };
    let sources = [at(0), at(64), at(128)];
    let reduce = |dst, count: usize, operator, dtype| Op::Reduce {
        dst: At { region: &regions.output, offset: dst },
        srcs: &sources[..count],
        bytes: 16,
        reduction: Reduction::new(operator, dtype).unwrap(),
    };
    let sum = reduce(0, 2, Operator::Sum, DType::F32);
    let cases = [
        [sum, reduce(16, 2, Operator::Max, DType::F32)],
        [sum, reduce(16, 2, Operator::Sum, DType::U32)],
        [reduce(0, 2, Operator::Average, DType::F32), reduce(16, 3, Operator::Average, DType::F32)],
    ];
    for ops in &cases {
        refused(
            compile((engine, &regions.flags), ops, None),
            ErrorKind::Unavailable,
            "reductions of several kinds",
        );
    }
    let odd = [reduce(0, 2, Operator::Max, DType::F32)];
    let both = compile_both((engine, &regions.flags), [&[sum], &odd], None, 3);
    refused(both, ErrorKind::InvalidArgument, "expected the same ops");

    compile((engine, &regions.flags), &[sum, reduce(16, 3, Operator::Sum, DType::F32)], None)
        .unwrap();
}

#[test]
fn memory_of_the_host_is_refused() {
    let (_driver, _turn) = driver();
    let fabrics = fabrics(2);
    let mut members = uncompiled(&fabrics, CASE);
    let Member { engine, regions, .. } = &mut members[0];

    let host = host::Fabric::open(Rank(0), 1).unwrap();
    let region = DynRegion::new(Arc::new(host.memory().allocate(64, Role::Data).unwrap()));
    // SAFETY: the region lives as long as the test.
    let adopted = unsafe { fabrics[0].memory().adopt(&region, Role::Data) }.unwrap();
    assert!(adopted.is_on_host());

    let put = [Op::Put {
        dst: At { region: &regions.inboxes[1], offset: 0 },
        src: At { region: &adopted, offset: 0 },
        bytes: 32,
    }];
    refused(
        compile((engine, &regions.flags), &put, None),
        ErrorKind::Unavailable,
        "memory of the host",
    );
}

/// Engines reserve their blocks, so that the launches of all of them can run at the same time.
#[test]
fn the_blocks_of_a_device_are_shared() {
    let (_driver, _turn) = driver();
    let fabrics = fabrics(2);
    let offers = fabrics[0].offers().unwrap();
    let offer = offers.iter().find(|offer| offer.caps.kind == "kernels").unwrap();
    let (limits, resident) = (offer.fused.unwrap(), offer.resident_blocks_max);
    assert_eq!((limits.threads, limits.ranks_max), (512, 8));

    let refuse = |blocks| engine(&fabrics[0], blocks).map(drop);
    refused(refuse(limits.blocks_max + 1), ErrorKind::InvalidArgument, "blocks of threads");

    // Every engine takes as many as it can, and the last one what is left.
    let mut engines = Vec::new();
    let mut left = resident;
    while left > 0 {
        let blocks = left.min(limits.blocks_max);
        engines.push(engine(&fabrics[0], blocks).unwrap());
        left -= blocks;
    }
    let text = format!("{resident} can run at the same time");
    refused(refuse(1), ErrorKind::Unavailable, &text);
    engine(&fabrics[1], 1).expect("another device has blocks of its own");

    drop(engines.pop());
    refuse(1).expect("there is room again");
}
