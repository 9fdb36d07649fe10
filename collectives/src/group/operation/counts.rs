//! Defines the counts of a start of an all-to-all-v, as the caller gives them and as ranks exchange
//! them, and checks those of all ranks.
//!
//! Every rank gets the counts of all ranks and makes the same checks with the same result. So
//! either all ranks go on with a start, or all of them return an error before a byte moves.

use peerlane_hal::{ErrorKind, Rank};

use crate::element::DType;
use crate::layout::PlacedBlock;

/// The number of elements that a rank sends to each rank in one start of an
/// [`AllToAllV`](super::AllToAllV).
///
/// ```
/// use peerlane::SendCounts;
///
/// let packed = SendCounts::new(&[3, 0, 2]);
/// let placed = SendCounts::new(&[3, 0, 2]).displacements(&[10, 0, 4]);
/// let checked = SendCounts::new(&[3, 0, 2]).receive_counts(&[3, 5, 0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendCounts<'a> {
    send: &'a [usize],
    displacements: Option<&'a [usize]>,
    receive: Option<&'a [usize]>,
}

impl<'a> SendCounts<'a> {
    /// Creates counts by which this rank sends `send[r]` elements to rank r. The blocks follow each
    /// other in the input, in rank order.
    pub fn new(send: &'a [usize]) -> Self {
        Self { send, displacements: None, receive: None }
    }

    /// Sets the element of the input at which the block for each rank begins. Blocks that are not
    /// empty must not overlap.
    #[must_use]
    pub fn displacements(self, displacements: &'a [usize]) -> Self {
        Self { displacements: Some(displacements), ..self }
    }

    /// Sets the number of elements that this rank expects from each rank. If another number comes,
    /// every rank returns an error that names the two ranks.
    #[must_use]
    pub fn receive_counts(self, receive: &'a [usize]) -> Self {
        Self { receive: Some(receive), ..self }
    }
}

impl<'a> From<&'a [usize]> for SendCounts<'a> {
    fn from(send: &'a [usize]) -> Self {
        Self::new(send)
    }
}

impl<'a> From<&'a Vec<usize>> for SendCounts<'a> {
    fn from(send: &'a Vec<usize>) -> Self {
        Self::new(send)
    }
}

impl<'a, const N: usize> From<&'a [usize; N]> for SendCounts<'a> {
    fn from(send: &'a [usize; N]) -> Self {
        Self::new(send)
    }
}

/// The lists of a row, in their order, by the names that errors have for them.
const LISTS: [&str; 3] = ["send counts", "displacements", "receive counts"];

/// The bits of the first word of a row say which of the lists the rank has given.
const HAS_DISPLACEMENTS: u64 = 1 << 1;
const HAS_RECEIVE: u64 = 1 << 2;
/// The bit of the first word that says that the rank makes the start on a stream.
const ON_STREAM: u64 = 1 << 5;
/// The bits of the first word from this one on say what the elements are, if starts differ in that.
const ELEMENTS_SHIFT: u32 = 16;
/// The bit of the first word that says that the rank makes the start beside compute, if starts
/// choose.
const BESIDE_COMPUTE: u64 = 1 << 63;
/// The first word of a row whose rank refuses the start for a reason that only the rank knows.
const REFUSED: u64 = 1 << 3;
/// The first word of a row in which a list has another length than the number of ranks: this one
/// for the first list, and the next ones for the lists after it. The second word is that length.
const WRONG_LEN: u64 = 1 << 4;

/// The elements of a start that counts name, in an operation on bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::group) struct StartElements {
    pub(in crate::group) dtype: DType,
    /// The elements of the type that one count is for.
    pub(in crate::group) unit: usize,
}

impl StartElements {
    fn bytes(self) -> u64 {
        (self.dtype.bytes() * self.unit) as u64
    }

    /// Returns the number by which ranks compare their elements.
    fn code(self) -> u64 {
        let index = DType::ALL.iter().position(|dtype| *dtype == self.dtype);
        1 + index.unwrap_or_default() as u64 + ((self.unit as u64) << u8::BITS)
    }

    /// Returns the text of a code of any rank.
    fn name_of_code(code: u64) -> String {
        let index = usize::try_from((code & 0xff).wrapping_sub(1)).unwrap_or(usize::MAX);
        let name = DType::ALL.get(index).map_or("unknown", |dtype| dtype.name());
        format!("{} of {name}", code >> u8::BITS)
    }
}

/// Stores the counts of all ranks in one start, in elements.
///
/// The row of a rank is a word that says what it contains, and a list of each kind, which has one
/// word for each rank.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CountTable {
    rank: Rank,
    ranks: usize,
    send_max: u64,
    receive_max: u64,
    /// The bytes of an element that counts name, divided by those of an element of the operation.
    unit: u64,
    /// What the elements are, if starts differ in that, and 0 otherwise.
    elements_code: u64,
    /// Whether this rank makes the next start beside compute, if starts choose.
    beside_compute: bool,
    rows: Vec<u64>,
    /// The offset of each block in the input of its provider, by provider and receiver.
    input_offsets: Vec<u64>,
    /// The offset of each block in the output of its receiver, by provider and receiver.
    output_offsets: Vec<u64>,
    /// The blocks of one row in the order of their offsets. Only its allocation is used again.
    sorted: Vec<(u64, Rank)>,
}

/// Says why a start is refused on all ranks.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) kind: ErrorKind,
    pub(super) text: String,
    /// The rank that the error is about.
    pub(super) peer: Rank,
    /// Whether that rank has given arguments that are wrong by themselves.
    pub(super) is_own: bool,
}

impl CountTable {
    /// Creates a table in which no rank sends anything.
    pub(super) fn new(rank: Rank, ranks: usize, send_max: usize, receive_max: usize) -> Self {
        Self {
            rank,
            ranks,
            send_max: send_max as u64,
            receive_max: receive_max as u64,
            unit: 1,
            elements_code: 0,
            beside_compute: false,
            rows: vec![0; ranks * Self::row_words(ranks)],
            input_offsets: vec![0; ranks * ranks],
            output_offsets: vec![0; ranks * ranks],
            sorted: Vec::new(),
        }
    }

    /// Returns the number of words of a row.
    pub(super) fn row_words(ranks: usize) -> usize {
        1 + LISTS.len() * ranks
    }

    /// Writes the row of a rank that gives `counts` for a start, which can be on a stream.
    pub(super) fn write_row(
        counts: &SendCounts<'_>,
        ranks: usize,
        on_stream: bool,
        row: &mut [u64],
    ) {
        let lists = [Some(counts.send), counts.displacements, counts.receive];
        let (first, words) = row.split_first_mut().expect("a row has a first word");
        words.fill(0);
        *first = if on_stream { ON_STREAM } else { 0 };

        for (index, list) in lists.into_iter().enumerate() {
            let Some(list) = list else { continue };
            if list.len() != ranks {
                *first = WRONG_LEN + index as u64;
                words[0] = list.len() as u64;
                return;
            }

            *first |= 1 << index;
            for (word, &value) in words[index * ranks..].iter_mut().zip(list) {
                *word = value as u64;
            }
        }
    }

    /// Sets the elements of the next start, in an operation on bytes.
    pub(super) fn set_elements(&mut self, elements: StartElements) {
        (self.unit, self.elements_code) = (elements.bytes(), elements.code());
    }

    /// Sets whether this rank makes the next start beside compute.
    pub(super) fn set_beside_compute(&mut self, beside_compute: bool) {
        self.beside_compute = beside_compute;
    }

    /// Returns whether all ranks make the start beside compute, after [`place`](Self::place).
    pub(super) fn is_beside_compute(&self) -> bool {
        self.beside_compute
    }

    /// Returns what ranks compare besides the counts, as bits of the first word of a row.
    pub(super) fn start_word(&self) -> u64 {
        let beside_compute = if self.beside_compute { BESIDE_COMPUTE } else { 0 };
        self.elements_code << ELEMENTS_SHIFT | beside_compute
    }

    /// Returns whether the operation has room for an input and an output of these elements.
    pub(super) fn has_room(&self, [input, output]: [u64; 2]) -> bool {
        input <= self.send_max && output <= self.receive_max
    }

    /// Returns whether a rank refuses the start for a reason that only the rank knows.
    pub(super) fn has_refusal(&self) -> bool {
        Rank::all(self.ranks).any(|rank| self.first_word(rank) == REFUSED)
    }

    /// Returns the elements that the longest input and the longest output need, in those of the
    /// operation, or `None` if the numbers overflow or a rank has not given them.
    pub(super) fn needs(&self) -> Option<[u64; 2]> {
        // A list of another length leaves the counts of its rank out.
        if Rank::all(self.ranks).any(|rank| self.first_word(rank) & WRONG_LEN != 0) {
            return None;
        }

        let sum = |mut counts: Box<dyn Iterator<Item = u64> + '_>| {
            counts.try_fold(0_u64, |sum, count| sum.checked_add(count))?.checked_mul(self.unit)
        };
        let mut needs = [0; 2];
        for one in Rank::all(self.ranks) {
            let sent = Box::new(Rank::all(self.ranks).map(move |to| self.count(one, to)));
            let received = Box::new(Rank::all(self.ranks).map(move |from| self.count(from, one)));
            needs = [needs[0].max(sum(sent)?), needs[1].max(sum(received)?)];
        }
        Some(needs)
    }

    /// Writes the row of a rank that refuses the start.
    pub(super) fn write_refusal(row: &mut [u64]) {
        row.fill(0);
        row[0] = REFUSED;
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the rows of all ranks, for the values of the next start.
    pub(super) fn rows_mut(&mut self) -> &mut [u64] {
        &mut self.rows
    }

    /// Checks the rows of all ranks, and computes where their blocks are.
    ///
    /// # Errors
    /// A fault of this rank first, then that of the lowest rank that has one, then differences
    /// between ranks.
    pub(super) fn place(&mut self) -> Result<(), Fault> {
        self.check_beside_compute()?;
        self.check_elements()?;
        self.place_sent(self.rank)?;
        for provider in Rank::all(self.ranks) {
            self.place_sent(provider)?;
        }
        for receiver in Rank::all(self.ranks) {
            self.check_expected(receiver)?;
        }
        for receiver in Rank::all(self.ranks) {
            self.place_received(receiver)?;
        }
        Ok(())
    }

    /// Returns whether every rank makes the start on the host.
    ///
    /// Each rank has finished its last start before it tells its counts then, so all outputs are
    /// free.
    pub(super) fn is_entered(&self) -> bool {
        Rank::all(self.ranks).all(|rank| self.first_word(rank) & ON_STREAM == 0)
    }

    /// Returns the number of elements that a rank sends to another one.
    pub(super) fn count(&self, provider: Rank, receiver: Rank) -> u64 {
        self.list(provider, 0)[receiver.index()]
    }

    /// Returns the offset of a block in the output of its receiver, in elements.
    pub(super) fn output_offset(&self, provider: Rank, receiver: Rank) -> u64 {
        self.output_offsets[self.pair(provider, receiver)]
    }

    /// Returns the length and the offsets of a block, in bytes.
    pub(super) fn block(&self, provider: Rank, receiver: Rank, element_bytes: u64) -> PlacedBlock {
        // The lengths that `place` has accepted lie within memory of the process, so none
        // overflows.
        let element_bytes = element_bytes * self.unit;
        PlacedBlock {
            bytes: self.count(provider, receiver) * element_bytes,
            input_offset: self.input_offsets[self.pair(provider, receiver)] * element_bytes,
            output_offset: self.output_offset(provider, receiver) * element_bytes,
        }
    }

    fn pair(&self, provider: Rank, receiver: Rank) -> usize {
        provider.index() * self.ranks + receiver.index()
    }

    fn first_word(&self, rank: Rank) -> u64 {
        self.rows[rank.index() * Self::row_words(self.ranks)]
    }

    /// Returns one of the [`LISTS`] of a rank.
    fn list(&self, rank: Rank, list: usize) -> &[u64] {
        let begin = rank.index() * Self::row_words(self.ranks) + 1 + list * self.ranks;
        &self.rows[begin..begin + self.ranks]
    }

    /// Returns the ranks that do not refuse the start. Only their rows say how they make it.
    fn starting(&self) -> impl Iterator<Item = Rank> {
        Rank::all(self.ranks).filter(|rank| self.first_word(*rank) != REFUSED)
    }

    /// Checks that all ranks make the start beside compute, or none does.
    fn check_beside_compute(&self) -> Result<(), Fault> {
        let beside_compute = |rank: Rank| self.first_word(rank) & BESIDE_COMPUTE != 0;
        let mut others = self.starting();
        let Some(first) = others.next() else { return Ok(()) };
        let expected = beside_compute(first);

        let Some(peer) = others.find(|rank| beside_compute(*rank) != expected) else {
            return Ok(());
        };

        let text = format!(
            "ranks disagree: beside_compute is {} on rank {peer}, {expected} on rank {first}",
            !expected
        );
        Err(Fault { kind: ErrorKind::Mismatch, text, peer, is_own: false })
    }

    /// Checks that all ranks move elements of one type and size.
    fn check_elements(&self) -> Result<(), Fault> {
        let code = |rank: Rank| (self.first_word(rank) & !BESIDE_COMPUTE) >> ELEMENTS_SHIFT;
        let Some(peer) = self.starting().find(|rank| code(*rank) != self.elements_code) else {
            return Ok(());
        };

        let [theirs, own] = [code(peer), self.elements_code].map(StartElements::name_of_code);
        let text = format!(
            "ranks disagree: rank {peer} moves elements that are {theirs}, rank {} elements that are {own}",
            self.rank
        );
        Err(Fault { kind: ErrorKind::Mismatch, text, peer, is_own: false })
    }

    /// Checks what a rank has given for itself, and computes where its blocks are in its input.
    fn place_sent(&mut self, provider: Rank) -> Result<(), Fault> {
        let fault =
            |text| Fault { kind: ErrorKind::InvalidArgument, text, peer: provider, is_own: true };

        let first = self.first_word(provider) & !(u64::MAX << ELEMENTS_SHIFT);
        if first == REFUSED {
            return Err(fault("the start cannot be made on this rank".to_owned()));
        }
        if let Some(name) = first.checked_sub(WRONG_LEN).and_then(|list| LISTS.get(list as usize)) {
            let (found, ranks) = (self.list(provider, 0)[0], self.ranks);
            return Err(fault(format!(
                "there are {found} {name}, expected {ranks}, one for each rank"
            )));
        }

        let most = self.send_max / self.unit;
        let mut sum = 0_u64;
        for receiver in Rank::all(self.ranks) {
            let count = self.count(provider, receiver);
            let pair = self.pair(provider, receiver);
            self.input_offsets[pair] = sum;
            sum = sum.checked_add(count).filter(|sum| *sum <= most).ok_or_else(|| {
                fault(format!(
                    "{count} elements are sent to rank {receiver} and {sum} to lower ranks, expected at most {most} in \
                     all, for which the operation was prepared"
                ))
            })?;
        }

        match first & HAS_DISPLACEMENTS {
            0 => Ok(()),
            _ => self.place_displaced(provider).map_err(fault),
        }
    }

    /// Checks the displacements that a rank has given. Returns the text of an error.
    fn place_displaced(&mut self, provider: Rank) -> Result<(), String> {
        self.sorted.clear();
        for receiver in Rank::all(self.ranks) {
            let count = self.count(provider, receiver);
            let pair = self.pair(provider, receiver);

            // Nothing is read for an empty block, whose displacement can be any number.
            if count == 0 {
                self.input_offsets[pair] = 0;
                continue;
            }

            let begin = self.list(provider, 1)[receiver.index()];
            let most = self.send_max / self.unit;
            if begin.checked_add(count).is_none_or(|end| end > most) {
                return Err(format!(
                    "the block for rank {receiver} is {count} elements from element {begin} of the input, expected a \
                     range within 0..{most}"
                ));
            }
            self.input_offsets[pair] = begin;
            self.sorted.push((begin, receiver));
        }

        // If two blocks overlap, the first of them overlaps its successor, too.
        self.sorted.sort_unstable();
        for pair in self.sorted.windows(2) {
            let [(first, of_first), (second, of_second)] = [pair[0], pair[1]];
            let [first_end, second_end] = [(first, of_first), (second, of_second)]
                .map(|(begin, receiver)| begin + self.count(provider, receiver));
            if first_end > second {
                return Err(format!(
                    "the blocks for ranks {of_first} and {of_second} overlap: they are elements {first}..{first_end} \
                     and {second}..{second_end} of the input"
                ));
            }
        }
        Ok(())
    }

    /// Checks that a rank gets what it expects, if it has said so.
    fn check_expected(&self, receiver: Rank) -> Result<(), Fault> {
        if self.first_word(receiver) & HAS_RECEIVE == 0 {
            return Ok(());
        }

        for provider in Rank::all(self.ranks) {
            let (sent, expected) =
                (self.count(provider, receiver), self.list(receiver, 2)[provider.index()]);
            if sent != expected {
                let text = format!(
                    "ranks disagree: rank {provider} sends {sent} elements to rank {receiver}, which expects {expected}"
                );
                let kind = ErrorKind::Mismatch;
                return Err(Fault { kind, text, peer: receiver, is_own: false });
            }
        }
        Ok(())
    }

    /// Checks that the output of a rank has room, and computes where its blocks are there.
    fn place_received(&mut self, receiver: Rank) -> Result<(), Fault> {
        let mut sum = 0_u64;
        for provider in Rank::all(self.ranks) {
            let pair = self.pair(provider, receiver);
            self.output_offsets[pair] = sum;
            sum = sum.saturating_add(self.count(provider, receiver));
        }

        let most = self.receive_max / self.unit;
        if sum > most {
            let text = format!(
                "rank {receiver} receives {sum} elements, expected at most {most}, for which the operation was prepared"
            );
            let kind = ErrorKind::InvalidArgument;
            return Err(Fault { kind, text, peer: receiver, is_own: false });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: [SendCounts<'_>; 2]) -> Result<CountTable, String> {
        let mut table = CountTable::new(Rank(1), 2, 10, 8);
        let words = CountTable::row_words(2);
        for (row, counts) in table.rows_mut().chunks_mut(words).zip(&rows) {
            CountTable::write_row(counts, 2, false, row);
        }
        match table.place() {
            Ok(()) => Ok(table),
            Err(Fault { kind, text, peer, .. }) => Err(format!("{kind}, rank {peer}: {text}")),
        }
    }

    #[test]
    fn blocks_are_packed_in_the_output_and_placed_in_the_input() {
        let placed = SendCounts::new(&[3, 4]).displacements(&[7, 0]).receive_counts(&[3, 2]);
        let table = table([placed, SendCounts::new(&[2, 4])]).unwrap();
        let block = |from, to| {
            let block = table.block(Rank(from), Rank(to), 4);
            (block.bytes, block.input_offset, block.output_offset)
        };
        assert_eq!([block(0, 0), block(0, 1)], [(12, 28, 0), (16, 0, 0)]);
        assert_eq!([block(1, 0), block(1, 1)], [(8, 0, 12), (16, 8, 16)]);
    }

    #[test]
    fn faults_are_named_and_those_of_this_rank_come_first() {
        let none = SendCounts::new(&[0, 0]);
        let text = |first, second| table([first, second]).err().unwrap();
        const MAX: usize = usize::MAX;
        let counts: [(SendCounts<'_>, &str); 8] = [
            (SendCounts::new(&[1]), "there are 1 send counts, expected 2, one for each rank"),
            (none.displacements(&[]), "there are 0 displacements, expected 2, one for each rank"),
            (
                none.receive_counts(&[0; 3]),
                "there are 3 receive counts, expected 2, one for each rank",
            ),
            (
                SendCounts::new(&[4, 7]),
                "7 elements are sent to rank 1 and 4 to lower ranks, expected at most 10 in all, for which the operation \
                 was prepared",
            ),
            (
                SendCounts::new(&[MAX, 2]),
                "18446744073709551615 elements are sent to rank 0 and 0 to lower ranks, expected at most 10 in all, for \
                 which the operation was prepared",
            ),
            (
                SendCounts::new(&[1, 2]).displacements(&[MAX, 0]),
                "the block for rank 0 is 1 elements from element 18446744073709551615 of the input, expected a range \
                 within 0..10",
            ),
            (
                SendCounts::new(&[3, 1]).displacements(&[0, 2]),
                "the blocks for ranks 0 and 1 overlap: they are elements 0..3 and 2..3 of the input",
            ),
            (
                SendCounts::new(&[2, 2]).displacements(&[1, 1]),
                "the blocks for ranks 0 and 1 overlap: they are elements 1..3 and 1..3 of the input",
            ),
        ];
        for (wrong, expected) in counts {
            assert_eq!(text(none, wrong), format!("invalid argument, rank 1: {expected}"));
            assert_eq!(text(wrong, none), format!("invalid argument, rank 0: {expected}"));
            assert!(text(wrong, SendCounts::new(&[])).contains("rank 1: there are 0"));
        }

        let five = SendCounts::new(&[5, 0]);
        assert_eq!(
            text(five, five),
            "invalid argument, rank 0: rank 0 receives 10 elements, expected at most 8, for which the operation was \
             prepared"
        );
        assert_eq!(
            text(five, none.receive_counts(&[1, 0])),
            "mismatch, rank 1: ranks disagree: rank 0 sends 0 elements to rank 1, which expects 1"
        );
    }
}
