//! Tests the shapes of reductions against a model that adds element by element: starts of any
//! length and place, several tensors, and lists of inputs and outputs.

use std::fmt::Debug;
use std::ops::Range;

use insta::assert_snapshot;
use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::collective::Collective;
use peerlane_collectives::cost::Form;
use peerlane_collectives::element::Element;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{
    BlockLens, Destination, Group, GroupOptions, Operation, OutputPart, Part,
};
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;

use crate::support::group::{self, placed};
use crate::support::ranks::{Host, in_flat_group, in_group};

/// An integer whose sums wrap.
trait Integer: Element + PartialEq + Debug {
    fn from_u32(value: u32) -> Self;
    fn plus(self, other: Self) -> Self;
}

impl Integer for u8 {
    fn from_u32(value: u32) -> Self {
        value as u8
    }

    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }
}

impl Integer for i32 {
    fn from_u32(value: u32) -> Self {
        value as i32
    }

    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }
}

/// Returns an element of a tensor in the input of a rank.
fn element<T: Integer>(seed: u64, rank: Rank, tensor: usize, index: usize) -> T {
    let mixed = (rank.0 + 1).wrapping_mul(7919)
        ^ (seed as u32).wrapping_mul(104_729)
        ^ (tensor as u32).wrapping_mul(1_299_709)
        ^ index as u32;
    T::from_u32(mixed.wrapping_mul(2_654_435_761) >> 7)
}

/// Returns the sums of a range of a tensor over the inputs of some ranks.
fn sums<T: Integer>(
    seed: u64,
    ranks: Range<usize>,
    tensor: usize,
    elements: Range<usize>,
) -> Vec<T> {
    let sum = |index| {
        let values = ranks.clone().map(|rank| element::<T>(seed, Rank::at(rank), tensor, index));
        values.reduce(T::plus).unwrap()
    };
    elements.map(sum).collect()
}

/// The lengths of one tensor of a reduction, of which each rank has one.
#[derive(Clone, Debug)]
struct Tensor {
    collective: Collective,
    lens: Vec<usize>,
}

impl Tensor {
    /// Returns the length of the tensor in the input of a rank.
    fn input_len(&self) -> usize {
        match self.collective {
            Collective::ReduceScatter => self.lens.iter().sum(),
            _ => self.lens[0],
        }
    }

    fn input<T: Integer>(&self, seed: u64, rank: Rank, number: usize) -> Vec<T> {
        (0..self.input_len()).map(|index| element(seed, rank, number, index)).collect()
    }

    /// Returns what a rank has at the end.
    fn output<T: Integer>(&self, seed: u64, rank: Rank, number: usize) -> Vec<T> {
        let (ranks, me) = (self.lens.len(), rank.index());
        if !self.collective.is_receiver(rank) {
            return Vec::new();
        }
        let (contributors, elements) = match self.collective {
            Collective::ReduceScatter => {
                let begin = self.lens[..me].iter().sum::<usize>();
                (0..ranks, begin..begin + self.lens[me])
            }
            Collective::Scan => (0..me + 1, 0..self.lens[0]),
            Collective::Exscan => (0..me, 0..self.lens[0]),
            _ => (0..ranks, 0..self.lens[0]),
        };
        sums(seed, contributors, number, elements)
    }
}

fn reductions(root: Rank) -> [Collective; 5] {
    [
        Collective::ReduceScatter,
        Collective::AllReduce,
        Collective::Reduce { root },
        Collective::Scan,
        Collective::Exscan,
    ]
}

/// Returns random lengths for each rank, which are equal unless the collective allows others.
fn random_lens(
    rng: &mut fastrand::Rng,
    collective: Collective,
    ranks: usize,
    most: &[usize],
) -> Vec<usize> {
    let mut len = |most: usize| match rng.u8(..4) {
        0 => rng.usize(..=most.min(20)),
        1 => most,
        _ => rng.usize(..=most),
    };
    let first = len(most[0]);
    match collective {
        Collective::ReduceScatter => (0..ranks).map(|rank| len(most[rank % most.len()])).collect(),
        _ => vec![first; ranks],
    }
}

/// Prepares a random resizable reduction, and runs starts of random lengths and places.
fn random_starts<T: Integer>(group: &mut Host, seed: u64) -> Result<(), Error> {
    let rng = &mut fastrand::Rng::with_seed(seed);
    let (me, ranks) = (group.rank(), group.ranks());
    let root = Rank::at(rng.usize(..ranks));
    // Most cases are all-reduces, which have several forms.
    let collective = reductions(root)[[0, 0, 1, 1, 1, 1, 2, 3, 4][rng.usize(..9)]];
    let in_place = collective == Collective::AllReduce && rng.u8(..3) == 0;
    let form = [None, None, Some(Form::Whole), Some(Form::InParts)][rng.usize(..4)];
    let form = form.filter(|_| collective == Collective::AllReduce && !in_place);
    let chunks = if rng.bool() { Some(rng.u32(1..=4)) } else { None };
    let len_max = [5, 200, 3000, 20_000][rng.usize(..4)];
    let prepared = random_lens(rng, collective, ranks, &[len_max]);
    let windows = rng.bool();
    let context = format!(
        "seed {seed}: {collective} of {prepared:?}, form {form:?}, {chunks:?} chunks, in place \
         {in_place}, windows {windows}, rank {me}"
    );

    let window_len = len_max * ranks + 50;
    let [source, target] = [group.window::<T>(window_len)?, group.window::<T>(window_len)?];
    let lens: BlockLens = match collective {
        Collective::ReduceScatter => prepared.clone().into(),
        _ => prepared[0].into(),
    };
    let mut builder = group.operation::<T>(collective, lens).resizable();
    if let Some(form) = form {
        builder = builder.form(form);
    }
    if let Some(chunks) = chunks {
        builder = builder.chunks(chunks);
    }
    let builder = placed(builder, windows.then_some([&source, &target]), in_place);
    let mut operation = builder.prepare()?;

    for start in 0..12 {
        let lens = random_lens(rng, collective, ranks, &prepared);
        let tensor = Tensor { collective, lens };
        let data = seed + 1000 * start;
        let [input, output] = [tensor.input::<T>(data, me, 0), tensor.output(data, me, 0)];
        let [begin, end] = if windows { [rng.usize(..50), rng.usize(..50)] } else { [0; 2] };

        let part = match collective {
            Collective::ReduceScatter => Part::lens(&tensor.lens),
            _ if rng.bool() => Part::lens(&tensor.lens),
            _ => Part::len(tensor.lens[0]),
        };
        let part = part.output(end);
        let part = if in_place { part } else { part.input(begin) };
        operation.resize(part)?;

        let context = format!("{context}, start {start} of {:?}", tensor.lens);
        if windows {
            target.slice_mut(0..window_len)?.fill(T::from_u32(99));
            let (window, at) = if in_place { (&target, end) } else { (&source, begin) };
            window.slice_mut(at..at + input.len())?.copy_from_slice(&input);
        } else {
            operation.input_mut()?.copy_from_slice(&input);
        }
        operation.run()?;
        if windows {
            let all = target.slice(0..window_len)?;
            assert_eq!(all[end..end + output.len()], output[..], "{context}");
            let around = all[..end].iter().chain(&all[end + output.len()..]);
            assert!(around.copied().all(|other| other == T::from_u32(99)), "{context}");
        } else {
            assert_eq!(operation.output()?, output, "{context}");
        }
        // Peers may still read the window in place.
        group.barrier()?;
    }
    drop(operation);
    group.release(source)?;
    Ok(group.release(target)?)
}

#[test]
fn starts_of_any_length_and_place_add_the_right_elements() {
    for ranks in 1..=9 {
        in_group(ranks, &[Algorithm::Direct], |group, _| {
            for round in 0..5 {
                random_starts::<i32>(group, 16 * round + ranks as u64)?;
                random_starts::<u8>(group, 16 * round + ranks as u64 + 1000)?;
            }
            Ok(())
        });
    }
}

/// The plan of each start is that of an operation of its length, as far as powers of two tell.
#[test]
fn a_resizable_all_reduce_uses_both_forms() {
    for ranks in 2..=8 {
        in_flat_group(ranks, |group| {
            let len_max = 1 << 20;
            let mut reduce = group.all_reduce::<u8>(len_max).resizable().prepare()?;
            let report = reduce.report();
            assert_eq!(report.choice.form, Some(Form::InParts), "{report}");
            let is_whole = |form: Option<Form>| form == Some(Form::Whole);
            assert!(report.shorter.iter().any(|plan| is_whole(plan.form)), "{report}");
            assert!(report.to_string().contains(", whole"), "{report}");
            let shorter = report.shorter.clone();

            for power in 0..=20 {
                // With two outputs in turn, another form can be the best one.
                let fixed = group.all_reduce::<u8>(1 << power).outputs(1).prepare()?;
                let fixed = fixed.report().choice.form;
                let range = shorter.iter().rfind(|plan| 1 << power <= plan.bytes_max);
                let used = range.map_or(Some(Form::InParts), |plan| plan.form);
                assert_eq!(used, fixed, "{ranks} ranks, {} bytes", 1 << power);

                reduce.resize(1 << power)?.input_mut()?.fill(1 + group.rank().0 as u8);
                reduce.run()?;
                let sum = (ranks * (ranks + 1) / 2) as u8;
                assert_eq!(reduce.output()?, vec![sum; 1 << power]);
            }
            Ok(())
        });
    }
}

/// A start that nobody waits for is complete before one with another plan uses the inbox.
#[test]
fn starts_that_nobody_waits_for_keep_their_contributions() {
    for ranks in 2..=5 {
        in_group(ranks, &[Algorithm::Direct], |group, _| {
            let rng = &mut fastrand::Rng::with_seed(ranks as u64);
            let len_max = 30_000;
            let mut reduce = group.all_reduce::<i32>(len_max).resizable().prepare()?;
            for start in 0..60 {
                let len = if rng.bool() { rng.usize(..100) } else { rng.usize(..=len_max) };
                let tensor = Tensor { collective: Collective::AllReduce, lens: vec![len; ranks] };
                let input = tensor.input(start, group.rank(), 0);
                reduce.resize(len)?.input_mut()?.copy_from_slice(&input);
                if rng.bool() {
                    drop(reduce.start()?);
                    continue;
                }
                reduce.run()?;
                let output = tensor.output::<i32>(start, group.rank(), 0);
                assert!(reduce.output()? == output, "{ranks} ranks, start {start} of {len}");
            }
            Ok(())
        });
    }
}

/// A block of no bytes can get longer, and one that was longer can have no bytes.
#[test]
fn additions_of_nothing_do_nothing() {
    for ranks in 1..=5 {
        in_group(ranks, &[Algorithm::Direct], |group, _| {
            let me = group.rank();
            let empty = vec![0; ranks];
            let mut scatter = group.reduce_scatter::<i32>(100).chunks(3).resizable().prepare()?;
            for (start, lens) in [vec![0; ranks], vec![100; ranks], vec![0; ranks], vec![1; ranks]]
                .into_iter()
                .enumerate()
            {
                let tensor = Tensor { collective: Collective::ReduceScatter, lens };
                let input = tensor.input(start as u64, me, 0);
                scatter.resize(&tensor.lens[..])?.input_mut()?.copy_from_slice(&input);
                scatter.run()?;
                assert_eq!(scatter.output()?, tensor.output::<i32>(start as u64, me, 0));
            }

            let mut nothing = group.reduce_scatter::<i32>(&empty).resizable().prepare()?;
            nothing.run()?;
            nothing.resize(0)?.run()?;
            assert!(nothing.output()?.is_empty());
            let mut nothing = group.all_reduce::<i32>(0).resizable().prepare()?;
            nothing.resize(0)?.run()?;
            Ok(())
        });
    }
}

fn open(bootstrap: impl Bootstrap + 'static, timeout: u64) -> Result<Group, Error> {
    let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    let timeout = std::time::Duration::from_secs(timeout);
    GroupOptions::default().timeout(timeout).open(bootstrap, fabric)
}

/// No rank gets a sum of other lengths, whatever the plans of the ranks.
#[test]
fn starts_that_differ_between_ranks_are_named() {
    // The lengths of rank 1 and of the others; 4 bytes each.
    let cases = [(9, 10), (1, 0), (200_000, 10), (10, 200_000), (200_000, 199_999)];
    for (ranks, (one, others)) in (2..=4).flat_map(|ranks| cases.map(|case| (ranks, case))) {
        let errors = in_process::run(ranks, |bootstrap| {
            let mut group = open(bootstrap, 3)?;
            let mut reduce = group.all_reduce::<i32>(200_000).resizable().prepare()?;
            reduce.resize(others)?.run()?;
            let len = if group.rank() == Rank(1) { one } else { others };
            let mut run = || (0..20).try_for_each(|_| reduce.resize(len)?.run());
            Ok(run().expect_err("the lengths differ"))
        });
        for error in errors.unwrap() {
            let text = error.to_string();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{text}");
            assert!(text.contains(&format!("blocks of {one} elements")), "{text}");
            assert!(text.contains(&format!("blocks of {others} elements")), "{text}");
            assert!(text.contains("rank 1") && text.contains("ranks disagree"), "{text}");
        }
    }
}

/// What a rank has set before counts nothing.
#[test]
fn equal_lengths_are_equal_whatever_was_set_before() {
    group::in_group(2, |group| {
        let mut scatter = group.reduce_scatter::<i32>(10).resizable().prepare()?;
        if group.rank() == Rank(1) {
            scatter.resize(&[3, 4][..])?;
        }
        scatter.resize(5)?.input_mut()?.fill(2);
        scatter.run()?;
        assert_eq!(scatter.output()?, [4; 5]);
        Ok(())
    });
}

fn refused<T>(result: Result<T, Error>) -> String {
    let error = result.err().expect("an error");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    error.to_string()
}

#[test]
fn lengths_that_do_not_fit_are_refused() {
    let texts = group::in_group(2, |group| {
        let mut reduce = group.all_reduce::<i32>(100).resizable().prepare()?;
        let mut texts = vec![
            refused(reduce.resize(101)),
            refused(reduce.resize(&[7, 9][..])),
            refused(reduce.resize(&[7][..])),
            refused(reduce.resize(Part::send_receive(&[1, 1], &[1, 1]))),
            refused(reduce.resize(Part::len(50).output(51))),
        ];
        let mut scatter = group.reduce_scatter::<i32>([10, 20]).resizable().prepare()?;
        texts.push(refused(scatter.resize(&[11, 20][..])));
        let several = group.all_reduce::<i32>(BlockLens::tensors([1, 2])).resizable();
        texts.push(refused(several.prepare()));
        let list = [Destination::default()];
        texts.push(refused(group.all_reduce::<i32>(1).destinations(&list).resizable().prepare()));
        texts.push(refused(group.all_reduce::<i32>([1, 2]).prepare()));
        // The last lengths stay.
        reduce.resize(3)?.input_mut()?.fill(1);
        refused(reduce.resize(101));
        reduce.run()?;
        assert_eq!(reduce.output()?, [2; 3]);
        Ok(texts.join("\n"))
    });
    assert_eq!(texts[0], texts[1]);
    assert_snapshot!(texts[0], @r"
    the input is 101 elements, expected at most the 100 elements for which the operation was prepared
    lens[1] is 9 elements, and lens[0] is 7, expected one length for all ranks in an all-reduce
    lens has 1 lengths, expected 2, one for each rank
    the lengths do not have the form with which the operation was prepared; expected one length for an all-reduce
    the output is 50 elements from element 51, expected a range within 0..100, the elements of its buffer or window
    the block of rank 0 is 11 elements, expected at most the 10 elements for which the operation was prepared
    there are several tensors, expected one for an operation that is resizable
    destinations are given, expected one output buffer or a window for an operation that is resizable
    the lengths of an all-reduce differ between ranks, expected one length
    ");
}

/// The buffers of a reduction of several tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Buffers {
    Contiguous,
    SeparateInputs,
    SeparateOutputs,
    Separate,
    InPlace,
    InPlaceSeparate,
}

const ALL_BUFFERS: [Buffers; 6] = [
    Buffers::Contiguous,
    Buffers::SeparateInputs,
    Buffers::SeparateOutputs,
    Buffers::Separate,
    Buffers::InPlace,
    Buffers::InPlaceSeparate,
];

fn prepare_tensors<T: Integer>(
    group: &mut Host,
    tensors: &[Tensor],
    (chunks, form): (u32, Option<Form>),
    buffers: Buffers,
) -> Result<Operation<T>, Error> {
    let (me, collective) = (group.rank(), tensors[0].collective);
    let allocate = |lens: Vec<usize>| {
        lens.into_iter().map(|len| group.allocate::<T>(len)).collect::<Result<Vec<_>, _>>()
    };
    let inputs = allocate(tensors.iter().map(Tensor::input_len).collect())?;
    let outputs = tensors.iter().map(|tensor| tensor.output::<T>(0, me, 0).len());
    let outputs = allocate(outputs.collect())?;
    let lens = BlockLens::tensors(tensors.iter().map(|tensor| match collective {
        Collective::ReduceScatter => BlockLens::from(&tensor.lens),
        _ => BlockLens::from(tensor.lens[0]),
    }));
    let mut builder = group.operation::<T>(collective, lens).chunks(chunks).outputs(1);
    if let Some(form) = form {
        builder = builder.form(form);
    }
    match buffers {
        Buffers::Contiguous => builder,
        Buffers::SeparateInputs => builder.input_buffers(inputs),
        Buffers::SeparateOutputs => builder.output_buffers(outputs),
        Buffers::Separate => builder.input_buffers(inputs).output_buffers(outputs),
        Buffers::InPlace => builder.in_place(),
        Buffers::InPlaceSeparate => builder.in_place().output_buffers(outputs),
    }
    .prepare()
}

fn run_tensors<T: Integer>(
    group: &mut Host,
    tensors: &[Tensor],
    (chunks, form): (u32, Option<Form>),
    buffers: Buffers,
) -> Result<(), Error> {
    let me = group.rank();
    let mut operation = prepare_tensors::<T>(group, tensors, (chunks, form), buffers)?;
    for start in 0..2 {
        let input = |number: usize| tensors[number].input::<T>(start, me, number);
        let output = |number: usize| tensors[number].output::<T>(start, me, number);
        let all = 0..tensors.len();
        let context = format!("{tensors:?}, {chunks} chunks, {form:?}, {buffers:?}, rank {me}");
        for number in all.clone() {
            operation.input_piece_mut(number)?.copy_from_slice(&input(number));
        }
        let is_joined = !matches!(
            buffers,
            Buffers::SeparateInputs | Buffers::Separate | Buffers::InPlaceSeparate
        );
        if is_joined || tensors.len() == 1 {
            let inputs: Vec<T> = all.clone().flat_map(input).collect();
            assert_eq!(operation.input_mut()?, inputs, "{context}");
        }

        operation.run()?;
        for number in all.clone() {
            let found = operation.output_of(OutputPart::Tensor(number))?;
            assert_eq!(found, output(number), "{context}, tensor {number}");
        }
        if !matches!(
            buffers,
            Buffers::SeparateOutputs | Buffers::Separate | Buffers::InPlaceSeparate
        ) {
            let outputs: Vec<T> = all.flat_map(output).collect();
            assert_eq!(operation.output()?, outputs, "{context}");
        }
        group.barrier()?;
    }
    Ok(())
}

#[test]
fn several_tensors_are_reduced_with_every_placement() {
    for ranks in 1..=9 {
        in_group(ranks, &[Algorithm::Direct], |group, _| {
            let rng = &mut fastrand::Rng::with_seed(ranks as u64);
            for collective in reductions(Rank::at(ranks / 2)) {
                for buffers in ALL_BUFFERS {
                    let in_place = matches!(buffers, Buffers::InPlace | Buffers::InPlaceSeparate);
                    if in_place && collective != Collective::AllReduce {
                        continue;
                    }
                    let number = rng.usize(1..=4);
                    let tensors = (0..number).map(|_| {
                        let most = [0, 3, 65, 300][rng.usize(..4)];
                        Tensor { collective, lens: random_lens(rng, collective, ranks, &[most]) }
                    });
                    let tensors: Vec<_> = tensors.collect();
                    let chunks = rng.u32(1..=4);
                    let forms = [None, Some(Form::Whole), Some(Form::InParts)];
                    let form = forms[rng.usize(..3)];
                    let form = form.filter(|_| collective == Collective::AllReduce && !in_place);
                    run_tensors::<i32>(group, &tensors, (chunks, form), buffers)?;
                    run_tensors::<u8>(group, &tensors, (chunks, form), buffers)?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn the_result_goes_where_the_only_destination_says() {
    for ranks in 1..=5 {
        in_group(ranks, &[Algorithm::Direct], |group, _| {
            let me = group.rank();
            for collective in reductions(Rank(0)) {
                let tensor = Tensor { collective, lens: vec![70; ranks] };
                // Each rank has a place of its own.
                let to = Destination { buffer: me.index() % 2, offset: 3 + me.index() };
                let result = tensor.output::<i32>(1, me, 0);
                let given = |len| group.allocate::<i32>(len);
                let buffers = vec![given(80 + me.index())?, given(80 + me.index())?];
                let builder = group.operation::<i32>(collective, 70).destinations(&[to]);
                let mut operation = builder.output_buffers(buffers).chunks(2).prepare()?;
                for number in 0..2 {
                    operation.output_mut_of(OutputPart::Buffer(number))?.fill(-1);
                }
                operation.input_mut()?.copy_from_slice(&tensor.input(1, me, 0));
                operation.run()?;

                let context = format!("{collective}, {ranks} ranks, rank {me}");
                assert_eq!(operation.output_of(OutputPart::Tensor(0))?, result, "{context}");
                for number in 0..2 {
                    let found = operation.output_of(OutputPart::Buffer(number))?;
                    let mut expected = vec![-1; found.len()];
                    if number == to.buffer {
                        expected[to.offset..to.offset + result.len()].copy_from_slice(&result);
                    }
                    assert_eq!(found, expected, "{context}, buffer {number}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_list_of_inputs_is_reduced_and_scattered() {
    for ranks in 1..=7 {
        in_group(ranks, &[Algorithm::Direct], |group, _| {
            let me = group.rank();
            let lens = (0..ranks).map(|rank| [70, 1, 0, 300][rank % 4]).collect::<Vec<_>>();
            let tensor = Tensor { collective: Collective::ReduceScatter, lens };
            let inputs = tensor.lens.iter().map(|&len| group.allocate::<u8>(len));
            let inputs: Vec<_> = inputs.collect::<Result<_, _>>()?;
            // Only some ranks have a list.
            let has_list = me.index() % 3 != 1;
            let builder = group.reduce_scatter::<u8>(&tensor.lens).chunks(2).outputs(1);
            let builder = if has_list { builder.input_buffers(inputs) } else { builder };
            let mut scatter = builder.prepare()?;
            if has_list && ranks > 1 {
                let text = refused(scatter.input_mut());
                assert!(text.contains("use `input_block_mut`"), "{text}");
            }

            for start in 0..3 {
                let input = tensor.input::<u8>(start, me, 0);
                let mut begin = 0;
                for (receiver, &len) in Rank::all(ranks).zip(&tensor.lens) {
                    let block = scatter.input_block_mut(receiver)?;
                    block.copy_from_slice(&input[begin..begin + len]);
                    begin += len;
                }
                scatter.run()?;
                assert_eq!(scatter.output()?, tensor.output::<u8>(start, me, 0), "rank {me}");
            }
            Ok(())
        });
    }
}

#[test]
fn lists_that_do_not_fit_are_refused() {
    let texts = group::in_group(3, |group| {
        let to = [Destination::default(); 3];
        let mut texts = vec![refused(group.all_reduce::<i32>(1).destinations(&to).prepare())];
        texts.push(refused(group.reduce_scatter::<i32>(1).destinations(&[]).prepare()));
        let tensors = BlockLens::tensors([1, 2]);
        let several = group.reduce_scatter::<i32>(tensors).destinations(&to[..1]);
        texts.push(refused(several.prepare()));
        let buffers = |group: &mut Group, number| {
            (0..number).map(|_| group.allocate::<i32>(1)).collect::<Result<Vec<_>, _>>()
        };
        let two = buffers(group, 2)?;
        texts.push(refused(group.reduce_scatter::<i32>(1).input_buffers(two).prepare()));
        let three = buffers(group, 3)?;
        texts.push(refused(group.all_reduce::<i32>(1).input_buffers(three).prepare()));
        let three = buffers(group, 3)?;
        texts.push(refused(group.reduce_scatter::<i32>(2).input_buffers(three).prepare()));
        Ok(texts.join("\n"))
    });
    assert_snapshot!(texts[0], @r"
    destinations has 3 entries, expected 1, because the output of an all-reduce is one block
    destinations has 0 entries, expected 1, because the output of a reduce-scatter is one block
    there are 2 tensors, expected 1 for an output with destinations
    2 input buffers are given, expected 1, or 3, one for each rank
    3 input buffers are given, expected 1
    the input has 4 bytes, expected 8 bytes
    ");
}
