-- One request to the ledger, done in one atomic step: all of it or nothing.
--
-- ARGV: the operation, the epoch and the seq that the client has seen ('' and 0: none yet), an epoch to begin with,
-- then what the operation needs. The answer: what came of it, the epoch, the seq, then what the operation gives.
--
-- Keys, all under one hash tag, which is why only the first is declared:
--   {loopguard}:meta        epoch, which names this database's books, and seq, which counts their changes
--   {loopguard}:leases      ids of the reservations that are held, by the time at which their leases run out
--   {loopguard}:call:ID     a reservation: its state (held, expired, over), entries, on_expiry; late if it expired
--   {loopguard}:book:BOOK   an account's unit: spent, reserved, overdraft
--
-- Entries are 'BOOK BEGINS ENDS AMOUNT CAP' one after the other, '-' for what is None. Amounts are integers of any
-- size, written in decimal without leading zeros; times are seconds since the epoch.

local META, LEASES, CALL, BOOK = KEYS[1], '{loopguard}:leases', '{loopguard}:call:', '{loopguard}:book:'
local ENTRY = '(%S+) (%S+) (%S+) (%d+) (%S+)'
local DAY = 86400
local KEEP_OVER = DAY / 24 -- how long a request may be delivered again
local KEEP_EXPIRED = 7 * DAY -- how late a call may be settled
local KEEP_BOOK = 62 * DAY -- how long a window that is over can be looked at
local BATCH = 1000 -- leases ended by one request, so that none of them takes long

-- Exact arithmetic ------------------------------------------------------------------------------------------------
-- Lua's numbers are doubles, exact up to 2^53 ≈ 9 × 10^15: so 15 digits at a time.

local function less(a, b)
    if #a ~= #b then return #a < #b end
    return a < b
end

local function combine(a, b, sign)
    local limbs, carry, i, j = {}, 0, #a, #b
    while i > 0 or j > 0 or carry ~= 0 do
        local x = tonumber(string.sub(a, math.max(i - 14, 1), math.max(i, 0))) or 0
        local y = tonumber(string.sub(b, math.max(j - 14, 1), math.max(j, 0))) or 0
        local sum = x + sign * y + carry
        carry = 0
        if sum < 0 then
            sum, carry = sum + 1e15, -1
        elseif sum >= 1e15 then
            sum, carry = sum - 1e15, 1
        end
        table.insert(limbs, 1, string.format('%015.0f', sum))
        i, j = i - 15, j - 15
    end
    return (string.gsub(table.concat(limbs), '^0+(%d)', '%1'))
end

local function plus(a, b)
    if b == '0' then return a end
    return combine(a, b, 1)
end

local function minus(a, b) -- never below 0
    if b == '0' then return a end
    if less(a, b) then return '0' end
    return combine(a, b, -1)
end

local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6

-- The books -------------------------------------------------------------------------------------------------------

local function read(name)
    local found = redis.call('HMGET', BOOK .. name, 'spent', 'reserved', 'overdraft')
    return {spent = found[1] or '0', reserved = found[2] or '0', overdraft = found[3] or '0'}
end

local function write(name, ends, book)
    local key = BOOK .. name
    redis.call('HSET', key, 'spent', book.spent, 'reserved', book.reserved, 'overdraft', book.overdraft)
    if ends ~= '-' and book.reserved == '0' then
        redis.call('EXPIRE', key, math.ceil(math.max(ends - now, 0)) + KEEP_BOOK)
    else
        redis.call('PERSIST', key)
    end
end

local function expire(id)
    local entries, on_expiry = unpack(redis.call('HMGET', CALL .. id, 'entries', 'on_expiry'))
    redis.call('HSET', CALL .. id, 'state', 'expired', 'late', 1)
    redis.call('EXPIRE', CALL .. id, KEEP_EXPIRED)
    redis.call('ZREM', LEASES, id)
    for name, _, ends, amount in string.gmatch(entries or '', ENTRY) do
        local book = read(name)
        book.reserved = minus(book.reserved, amount)
        if on_expiry == 'charge' then book.spent = plus(book.spent, amount) end
        write(name, ends, book)
    end
end

-- Are these the books that the client knows? ----------------------------------------------------------------------

local op, epoch, seen, fresh = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local meta = redis.call('HMGET', META, 'epoch', 'seq')
local current, seq = meta[1], tonumber(meta[2] or 0)

local function answer(outcome, ...)
    return {outcome, current, seq, ...}
end

local function changed(...)
    seq = redis.call('HINCRBY', META, 'seq', 1)
    return answer(...)
end

if epoch == '' and not current then
    current = fresh
    redis.call('HSET', META, 'epoch', current)
elseif epoch ~= '' and (epoch ~= current or seq < seen) then
    -- A new epoch, so that all who knew what is lost now hear of it, however the seq goes on.
    if epoch == current then redis.call('HSET', META, 'epoch', fresh) end
    return {'lost'}
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, BATCH)) do expire(id) end

if op == 'balance' then
    local book = read(ARGV[5])
    return answer('ok', book.spent, book.reserved, book.overdraft)
end

local id = ARGV[5]
local due = redis.call('ZSCORE', LEASES, id)
if due and tonumber(due) <= now then expire(id) end -- it wasn't among the first
local state, entries, on_expiry, late = unpack(redis.call('HMGET', CALL .. id, 'state', 'entries', 'on_expiry', 'late'))

-- Operations ------------------------------------------------------------------------------------------------------

local function hold(seconds)
    redis.call('ZADD', LEASES, string.format('%.6f', now + seconds), id)
end

local function over()
    redis.call('HSET', CALL .. id, 'state', 'over')
    redis.call('HDEL', CALL .. id, 'entries', 'on_expiry')
    redis.call('EXPIRE', CALL .. id, KEEP_OVER)
    redis.call('ZREM', LEASES, id)
end

if op == 'reserve' then
    local asked, lease, policy = ARGV[6], tonumber(ARGV[7]), ARGV[8]
    local books, balances = {}, {}
    local function note(book)
        table.insert(books, book)
        for _, amount in ipairs({book.spent, book.reserved, book.overdraft}) do table.insert(balances, amount) end
    end
    if state == 'held' and asked == entries then
        for name in string.gmatch(asked, ENTRY) do note(read(name)) end
        return answer('ok', unpack(balances))
    elseif state then
        return answer('used')
    end
    for _, begins, ends in string.gmatch(asked, ENTRY) do
        if (begins ~= '-' and now < tonumber(begins)) or (ends ~= '-' and now >= tonumber(ends)) then
            return answer('window', string.format('%.6f', now))
        end
    end
    for name, _, _, amount, cap in string.gmatch(asked, ENTRY) do
        local book = read(name)
        local total = plus(plus(book.spent, book.reserved), amount)
        if amount ~= '0' and cap ~= '-' and less(cap, total) then
            return answer('short', #books, book.spent, book.reserved, book.overdraft)
        end
        book.reserved = plus(book.reserved, amount)
        note(book)
    end
    local place = 0
    for name, _, ends in string.gmatch(asked, ENTRY) do
        place = place + 1
        write(name, ends, books[place])
    end
    redis.call('HSET', CALL .. id, 'state', 'held', 'entries', asked, 'on_expiry', policy)
    hold(lease)
    return changed('ok', unpack(balances))
elseif op == 'renew' then
    if state ~= 'held' then return answer('gone') end
    redis.call('HSET', CALL .. id, 'on_expiry', ARGV[7])
    hold(tonumber(ARGV[6]))
    return changed('ok')
end

-- settle, with units and amounts in turn, or release
if not state then
    if op == 'settle' then return answer('unknown') end
    over() -- so that a reserve that was overtaken holds nothing
    return changed('ok')
elseif state == 'over' then
    return answer(late and 'late' or 'ok')
end
local amounts = {}
for place = 6, #ARGV, 2 do amounts[ARGV[place]] = ARGV[place + 1] end
over()
for name, _, ends, amount in string.gmatch(entries or '', ENTRY) do
    local book, paid, covered = read(name), amounts[string.match(name, '^.*/(.*)$')] or '0', amount
    if state == 'held' then
        book.reserved = minus(book.reserved, amount)
    else -- what the expiry did makes way for what the call cost
        if on_expiry ~= 'charge' then covered = '0' end
        book.spent = minus(book.spent, covered)
    end
    book.spent = plus(book.spent, paid)
    book.overdraft = plus(book.overdraft, minus(paid, covered))
    write(name, ends, book)
end
return changed(late and 'late' or 'ok')
