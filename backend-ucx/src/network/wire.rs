//! Encodes the headers of messages between engines.

use peerlane_hal::Rank;
use peerlane_hal::wire::{Reader, Truncated, Writer};

/// The header of a message, by which the receiver finds what to do with its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// The token of the receiver's address. A rank drops messages with another token.
    pub(crate) token: u64,
    pub(crate) sender: Rank,
    /// The number of the engine that has sent the message, in the fabric of the sender.
    pub(crate) engine: u32,
    /// The number of the message among those of this engine to this peer, counted from 0.
    pub(crate) sequence: u64,
    pub(crate) content: Content,
}

/// What a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// The bytes of a put, which may be none, a flag that is stored before them, and one that is
    /// stored when they are in place.
    Put { to: RegionByte, before: Option<FlagStore>, after: Option<FlagStore> },
    /// A request for bytes, which are the reply to it.
    Get { from: RegionByte, bytes: u64, request: u64 },
    /// The bytes of a get, or the news that its region was freed. It has no place in the order.
    Reply { request: u64, is_freed: bool },
    /// The end of an engine, which sends no more.
    End,
    /// A question of a rank, whose own token is the number of the message.
    Question { request: u64, question: Question },
    /// The answer to a question.
    Answer { request: u64, answer: Answer },
}

/// What a rank asks a peer outside of the order of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// Whether the token is that of the peer.
    Hello,
    /// Whether a region of the peer exists, which has so many bytes.
    Exists { region: u64, bytes: u64 },
}

/// The answer of a peer to a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Yes,
    /// The region was freed.
    Freed,
    /// The token is of another fabric.
    Unknown,
}

const ANSWERS: [Answer; 3] = [Answer::Yes, Answer::Freed, Answer::Unknown];

/// A byte of a region of the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionByte {
    pub(crate) region: u64,
    pub(crate) offset: u64,
}

/// A flag of the receiver, and the value that is stored in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlagStore {
    pub(crate) region: u64,
    pub(crate) word: u64,
    pub(crate) value: u64,
}

/// Takes the place of the word if a message has no flag.
const NO_FLAG: u64 = u64::MAX;

impl FlagStore {
    fn to_numbers(flag: Option<Self>) -> [u64; 3] {
        match flag {
            Some(Self { region, word, value }) => [region, word, value],
            None => [0, NO_FLAG, 0],
        }
    }

    fn from_numbers([region, word, value]: [u64; 3]) -> Option<Self> {
        (word != NO_FLAG).then_some(Self { region, word, value })
    }
}

/// The numbers of a header, whose meaning depends on the kind of the message.
const NUMBERS: usize = 8;

const PUT: u32 = 1;
const GET: u32 = 2;
const REPLY: u32 = 3;
const END: u32 = 4;
const HELLO: u32 = 5;
const EXISTS: u32 = 6;
const ANSWER: u32 = 7;

impl Header {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (kind, numbers): (_, [u64; NUMBERS]) = match self.content {
            Content::Put { to, before, after } => {
                let [before, after] = [before, after].map(FlagStore::to_numbers);
                let [first, second, third] = before;
                let [fourth, fifth, sixth] = after;
                (PUT, [to.region, to.offset, first, second, third, fourth, fifth, sixth])
            }
            Content::Get { from, bytes, request } => {
                (GET, [from.region, from.offset, bytes, request, 0, 0, 0, 0])
            }
            Content::Reply { request, is_freed } => {
                (REPLY, [request, is_freed.into(), 0, 0, 0, 0, 0, 0])
            }
            Content::End => (END, [0; NUMBERS]),
            Content::Question { request, question: Question::Hello } => {
                (HELLO, [request, 0, 0, 0, 0, 0, 0, 0])
            }
            Content::Question { request, question: Question::Exists { region, bytes } } => {
                (EXISTS, [request, region, bytes, 0, 0, 0, 0, 0])
            }
            Content::Answer { request, answer } => {
                (ANSWER, [request, answer as u64, 0, 0, 0, 0, 0, 0])
            }
        };

        let writer = Writer::new().u64(self.token).u32(self.sender.0).u32(self.engine);
        let writer = writer.u64(self.sequence).u32(kind);
        numbers.into_iter().fold(writer, |writer, number| writer.u64(number)).finish()
    }

    /// Decodes the header of a message; `None` if it is not one.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        Self::read(&mut Reader::new(bytes)).ok().flatten()
    }

    fn read(reader: &mut Reader<'_>) -> Result<Option<Self>, Truncated> {
        let (token, sender) = (reader.u64("token")?, Rank(reader.u32("rank")?));
        let (engine, sequence) = (reader.u32("engine")?, reader.u64("sequence")?);
        let kind = reader.u32("kind")?;
        let mut numbers = [0; NUMBERS];
        for number in &mut numbers {
            *number = reader.u64("number")?;
        }

        let [first, second, third, fourth, fifth, sixth, seventh, eighth] = numbers;
        let first_byte = RegionByte { region: first, offset: second };
        let content = match kind {
            PUT => Content::Put {
                to: first_byte,
                before: FlagStore::from_numbers([third, fourth, fifth]),
                after: FlagStore::from_numbers([sixth, seventh, eighth]),
            },
            GET => Content::Get { from: first_byte, bytes: third, request: fourth },
            REPLY => Content::Reply { request: first, is_freed: second != 0 },
            END => Content::End,
            HELLO => Content::Question { request: first, question: Question::Hello },
            EXISTS => {
                let question = Question::Exists { region: second, bytes: third };
                Content::Question { request: first, question }
            }
            ANSWER => {
                let answer = ANSWERS.into_iter().find(|answer| *answer as u64 == second);
                let Some(answer) = answer else { return Ok(None) };
                Content::Answer { request: first, answer }
            }
            _ => return Ok(None),
        };
        Ok(Some(Self { token, sender, engine, sequence, content }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_encoding() {
        let to = RegionByte { region: 7, offset: 1 << 40 };
        let flag = Some(FlagStore { region: 8, word: 3, value: u64::MAX });
        for content in [
            Content::Put { to, before: None, after: flag },
            Content::Put { to, before: flag, after: None },
            Content::Get { from: to, bytes: 9, request: 4 },
            Content::Reply { request: 4, is_freed: false },
            Content::Reply { request: 4, is_freed: true },
            Content::End,
            Content::Question { request: 3, question: Question::Hello },
            Content::Question { request: 3, question: Question::Exists { region: 7, bytes: 8 } },
            Content::Answer { request: 3, answer: Answer::Freed },
        ] {
            let header = Header { token: 5, sender: Rank(2), engine: 1, sequence: 6, content };
            let bytes = header.encode();
            assert_eq!(Header::decode(&bytes), Some(header));
            for length in 0..bytes.len() {
                assert_eq!(Header::decode(&bytes[..length]), None);
            }
        }
        assert_eq!(Header::decode(&[9; 92]), None);
    }
}
