redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])
return redis.pcall('GET', KEYS[1])
