//! Checks contract 13: reductions.

use peerlane_hal::{
    At, CopyEngine as _, DType, Error as _, ErrorKind, Fabric as _, Op, Operator, Reduction,
};

use crate::data::{aligned, pattern, seed, with_guards};
use crate::engine::{OpOf, TestEngine, put, signal, wait};
use crate::failure::{Outcome, ensure};
use crate::harness::Harness;
use crate::ranks::{Participant, on_each, on_ranks};

fn all_reductions() -> impl Iterator<Item = Reduction> {
    let pairs = DType::ALL.into_iter().flat_map(|dtype| Operator::ALL.map(|one| (one, dtype)));
    pairs.filter_map(|(operator, dtype)| Reduction::new(operator, dtype).ok())
}

/// The floating-point types, with the bits that random numbers keep and those that are set.
const FLOATS: [(DType, u64, u64); 4] = [
    (DType::F16, 0x87ff, 0x3800),
    (DType::Bf16, 0x80ff, 0x3f00),
    (DType::F32, 0x80ff_ffff, 0x3f00_0000),
    (DType::F64, 0x801f_ffff_ffff_ffff, 0x3fe0_0000_0000_0000),
];

/// Returns bytes that are numbers of moderate size in every type.
fn numbers(reduction: Reduction, seed: u64, count: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let (dtype, bytes) = (reduction.dtype(), reduction.dtype().bytes());

    // Of a floating-point number the exponent is that of a number from 0.5 to 2.
    let float = FLOATS.iter().find(|(float, ..)| *float == dtype);
    let (kept, set) = float.map_or((u64::MAX, 0), |(_, kept, set)| (*kept, *set));

    let number = |_| (random.u64(..) & kept | set).to_le_bytes().into_iter().take(bytes);
    (0..count).flat_map(number).collect()
}

/// Returns the result of a reduction of the sources on the processor.
fn reduced(reduction: Reduction, sources: &[Vec<u8>]) -> Vec<u8> {
    let bytes = sources[0].len();

    // Vectors of bytes may be misaligned for the type; words are not.
    let aligned = |bytes: &[u8]| {
        let words = bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        });
        words.collect::<Vec<u64>>()
    };
    let sources: Vec<Vec<u64>> = sources.iter().map(|source| aligned(source)).collect();

    let mut target = vec![0_u64; bytes.div_ceil(8)];
    let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr().cast()).collect();
    // SAFETY: the vectors have at least this many bytes, are aligned and do not overlap.
    unsafe { reduction.run(target.as_mut_ptr().cast(), &pointers, bytes) };

    target.iter().flat_map(|word| word.to_ne_bytes()).take(bytes).collect()
}

fn prepared<'r, 'w, H: Harness>(me: &mut Participant<'w, H>) -> Outcome<TestEngine<'r, 'w, H>> {
    let mut engine = me.engine()?;
    let reducer = engine.inner.prepare_reduce()?;
    ensure!(
        reducer.is_some_and(|reducer| reducer.sources_max >= 2),
        "prepare_reduce returned {reducer:?}, expected a reducer of at least 2 sources"
    );
    Ok(engine)
}

fn place_in<L>(region: &L, offset: u64) -> At<'_, L> {
    At { region, offset }
}

/// Reduces one to nine arrays of every type by every operator.
///
/// Lengths and places are no multiples of a vector. Every bit must be that of [`Reduction::run`],
/// and the bytes around the destination must not change.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_reduction_combines_its_sources_in_their_order<H: Harness>(harness: &H) -> Outcome {
    const GUARD: u64 = 64;
    const ELEMENTS_MAX: u64 = 5000;
    const STRIDE: u64 = 8 * ELEMENTS_MAX + GUARD;

    on_ranks(harness, 1, |me| {
        let (memory, landing) = (me.bytes(9 * STRIDE)?, me.bytes(STRIDE + GUARD)?);

        // The number of elements, and the offset in elements from an aligned place.
        let shapes = [(1, 0), (3, 1), (64, 0), (257, 3), (ELEMENTS_MAX, 0)];
        let cases = all_reductions().flat_map(|reduction| shapes.map(|shape| (reduction, shape)));
        let cases = (1_u64..).zip(cases).map(|(round, (reduction, (count, offset)))| {
            let number = round % 9 + 1;
            let place = |source: u64| source * STRIDE + offset * reduction.dtype().bytes() as u64;
            let srcs: Vec<_> = (0..number).map(|one| place_in(&memory.local, place(one))).collect();
            (round, reduction, count, srcs)
        });
        // The sources outlive the engine that runs the ops.
        let cases: Vec<_> = cases.collect();

        let mut engine = prepared(me)?;
        for (round, reduction, count, srcs) in &cases {
            let seeds = (0..srcs.len()).map(|source| seed(source, *round));
            let sources: Vec<_> = seeds.map(|seed| numbers(*reduction, seed, *count)).collect();
            for (src, bytes) in srcs.iter().zip(&sources) {
                me.write(src.region, src.offset, bytes);
            }
            me.poison(&landing.local, 0..STRIDE + GUARD);

            let bytes = sources[0].len() as u64;
            let (dst, reduction) = (place_in(&landing.local, GUARD), *reduction);
            engine.run(&[Op::Reduce { dst, srcs, bytes, reduction }])?;

            let expected = with_guards(&reduced(reduction, &sources), GUARD, STRIDE + GUARD);
            let what = format!("{reduction:?} of {} sources of {count} elements", srcs.len());
            me.ensure_bytes(&what, &landing.local, 0, &expected)?;
        }
        Ok(())
    })
}

fn sum() -> Reduction {
    Reduction::new(Operator::Sum, DType::U8).expect("bytes have a sum")
}

/// Copies blocks to places of the own rank and adds them at once, in one slice.
///
/// The sum replaces one of its sources. The same bytes are also put to a peer, from where an engine
/// may copy them back.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_reduction_follows_the_copies_to_oneself_before_it<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, 1..=3, |me| {
        let block = aligned(&me.caps, 700_000);
        let (source, memory) = (me.bytes(2 * block)?, me.bytes(2 * block)?);
        // Each rank writes to a part of its own.
        let beside = me.bytes(2 * block * me.ranks as u64)?;
        let arrived = me.flags(me.ranks as u64)?;
        let part = 2 * block * me.me as u64;
        let places = [0, block].map(|offset| place_in(&memory.local, offset));
        let mut engine = prepared(me)?;

        for round in 0..4 {
            let sent = pattern(seed(me.me, round), 2 * block);
            me.write(&source.local, 0, &sent);

            let own = &memory.remote[me.me];
            let copies =
                [0, block].map(|offset| put((own, offset), (&source.local, offset), block));
            let add = Op::Reduce { dst: places[0], srcs: &places, bytes: block, reduction: sum() };

            let peers = (1..me.ranks).map(|steps| &beside.remote[me.rank_after(steps)]);
            let puts = [0, block].into_iter().flat_map(|offset| {
                let (source, to) = (&source.local, part + offset);
                peers.clone().map(move |peer| put((peer, to), (source, offset), block))
            });
            let ops: Vec<_> = copies.into_iter().chain(puts).chain([add]).collect();
            engine.run(&ops)?;

            let (first, second) = sent.split_at(block as usize);
            let expected = reduced(sum(), &[first.to_vec(), second.to_vec()]);
            me.ensure_bytes("a sum behind copies", &memory.local, 0, &expected)?;
        }

        engine.wait_for_peers(me, &arrived)?;
        me.barrier()
    })
}

/// Adds what the rank before has put, and puts the sum to the rank after.
///
/// The reduction is behind a wait for the flag of the rank before. All ops are submitted ahead.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_put_behind_a_reduction_sends_its_result<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, 1..=3, |me| {
        let block = aligned(&me.caps, 100_000);
        // The own block, the one of the rank before, their sum, and the sum of the rank before.
        let (memory, flags) = (me.bytes(4 * block)?, me.flags(2)?);
        let (before, after) = (me.rank_after(me.ranks - 1), me.rank_after(1));
        let srcs = [0, block].map(|offset| place_in(&memory.local, offset));
        let mut engine = prepared(me)?;

        let own = |rank: usize| pattern(seed(rank, 0), block);
        me.write(&memory.local, 0, &own(me.me));
        me.barrier()?;

        let (to, flag) = (&memory.remote[after], &flags.remote[after]);
        let add = Op::Reduce {
            dst: place_in(&memory.local, 2 * block),
            srcs: &srcs,
            bytes: block,
            reduction: sum(),
        };
        let ops: [OpOf<'_, H>; 7] = [
            put((to, block), (&memory.local, 0), block),
            signal(flag, 0, 1),
            wait(&flags.local, 0, 1),
            add,
            put((to, 3 * block), (&memory.local, 2 * block), block),
            signal(flag, 1, 1),
            wait(&flags.local, 1, 1),
        ];
        engine.run(&ops)?;

        let sum_of = |rank: usize, before: usize| reduced(sum(), &[own(rank), own(before)]);
        let before_that = (before + me.ranks - 1) % me.ranks;
        me.ensure_bytes("the own sum", &memory.local, 2 * block, &sum_of(me.me, before))?;
        let expected = sum_of(before, before_that);
        me.ensure_bytes("the sum of the rank before", &memory.local, 3 * block, &expected)?;
        me.barrier()
    })
}

fn wide_sum<'r, L, R>(dst: At<'r, L>, srcs: &'r [At<'r, L>], bytes: u64) -> Op<'r, L, R> {
    let reduction = Reduction::new(Operator::Sum, DType::U64).expect("integers have a sum");
    Op::Reduce { dst, srcs, bytes, reduction }
}

fn refused<'r, H: Harness>(
    what: &str,
    engine: &mut TestEngine<'r, '_, H>,
    op: OpOf<'r, H>,
) -> Outcome {
    let kind = engine.try_submit(&[op]).map_err(|error| error.kind());
    ensure!(
        kind == Err(ErrorKind::InvalidArgument),
        "a reduction {what}: found {kind:?}, expected InvalidArgument"
    );
    Ok(())
}

/// Submits reductions that break a rule of their arguments.
///
/// They are not prepared, without sources, with too many, outside of their regions or misaligned.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_reduction_that_cannot_run_is_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let memory = me.bytes(64)?;
        let sources_max = me.fabric.engine(Default::default())?.prepare_reduce()?;
        let sources_max = sources_max.map_or(0, |reducer| reducer.sources_max);

        let [inside, outside, odd] = [0, 32, 12].map(|offset| place_in(&memory.local, offset));
        let too_many = vec![inside; sources_max + 1];
        let (one, beyond, misaligned) = ([inside], [inside, outside], [odd]);

        let (mut unprepared, mut engine) = (me.engine()?, prepared(me)?);
        refused("that is not prepared", &mut unprepared, wide_sum(inside, &one, 32))?;
        refused("without sources", &mut engine, wide_sum(inside, &[], 32))?;
        refused("with too many sources", &mut engine, wide_sum(inside, &too_many, 8))?;
        refused("with a source that is too short", &mut engine, wide_sum(inside, &beyond, 40))?;
        refused("with a destination that is too short", &mut engine, wide_sum(outside, &one, 40))?;
        refused("with a misaligned source", &mut engine, wide_sum(inside, &misaligned, 8))?;
        refused("with a misaligned destination", &mut engine, wide_sum(odd, &one, 8))?;
        refused("of half an element", &mut engine, wide_sum(inside, &one, 12))?;

        // Reductions of one source to itself and of no bytes are valid, and change nothing.
        engine.run(&[wide_sum(inside, &one, 64), wide_sum(inside, &one, 0)])?;
        me.ensure_poison("a copy to itself", &memory.local, 0..64)
    })
}
