-- Sends a message to all who listen, and keeps it as a field of the hash
-- KEYS[1]. ARGV: channel ('': nothing is sent), message, mode, field, version, time to live in
-- milliseconds (0: forever), how many fields there are at most, within which time
-- two records end that are one, how many milliseconds are left of a field at most,
-- what is sent in place of the message ('': the message).
--
-- A field is: when it ends (0: never), whether it is finished, the length of its
-- version, its version, its message. The field without a name is when fields that
-- have ended were last removed, which takes time, and so is done once a second.
if ARGV[1] ~= '' then
	redis.call('PUBLISH', ARGV[1], ARGV[10] ~= '' and ARGV[10] or ARGV[2])
end

local key, message, mode, field, version = KEYS[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local ttl, most, near, longest = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ends = ttl > 0 and now + ttl or 0
local finished = mode == 'finish' and 1 or 0

local kept = redis.call('HGET', key, field)
local alive, keptEnds, keptFinished, keptVersion, keptMessage = false, 0, 0, '', ''
if kept then
	local e, f, n, from = string.match(kept, '^(%d+) (%d) (%d+) ()')
	if e then
		keptEnds, keptFinished, keptVersion = tonumber(e), tonumber(f), string.sub(kept, from, from + n - 1)
		keptMessage = string.sub(kept, from + n)
		alive = keptEnds == 0 or keptEnds > now and keptEnds <= now + longest
	end
end

if mode == 'latest' then
	if alive and keptVersion > version then
		return 0
	end
elseif mode ~= 'replace' then
	if alive and keptVersion == version then
		if keptFinished == 1 then
			return 0
		end
		ends = keptEnds
	elseif mode == 'finish' then
		return 0
	elseif alive and keptFinished == 0 and ends ~= 0 and keptEnds ~= 0 and math.abs(ends - keptEnds) < near then
		if keptVersion < version then
			version, message = keptVersion, keptMessage
		end
		ends = math.max(ends, keptEnds)
	elseif alive and keptFinished == 0 and (keptEnds == 0 or ends ~= 0 and ends <= keptEnds) then
		return 0
	end
end

local purged = redis.call('HGET', key, '')
local count = redis.call('HLEN', key) - (purged and 1 or 0)
if not kept and count > 0 and (count % 64 == 0 or count >= most) then
	if not (math.abs(now - (tonumber(purged or 0) or 0)) < 1000) then
		local all = redis.call('HGETALL', key)
		for i = 1, #all, 2 do
			local e = tonumber(string.match(all[i + 1], '^%d+'))
			if all[i] ~= '' and (not e or e > 0 and e <= now or e > now + longest) then
				redis.call('HDEL', key, all[i])
				count = count - 1
			end
		end
		redis.call('HSET', key, '', string.format('%.0f', now))
	end
	if count >= most then
		return redis.error_reply('FULL too many records')
	end
end

redis.call('HSET', key, field, string.format('%.0f %d %d ', ends, finished, #version) .. version .. message)
if ends == 0 then
	redis.call('PERSIST', key)
else
	local left = redis.call('PTTL', key)
	if count == 0 or left >= 0 and left < ends - now then
		redis.call('PEXPIRE', key, string.format('%.0f', ends - now))
	end
end
return 1
